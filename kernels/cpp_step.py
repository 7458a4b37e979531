"""A step and KV memory as the C++ kernels read them."""

from __future__ import annotations

import ctypes
from ctypes import byref
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.kernels.base import AttentionMetadata, Rotation
from pdserve.kernels.native_library import (
    NativeHeads,
    NativeKvLayer,
    NativeProjected,
    NativeStep,
    require_done,
)


@dataclass(frozen=True)
class CppStep:
    """A step's structure and what its pointers point to."""

    native: NativeStep
    block_size: int
    keep: tuple[object, ...]


def build_step(metadata: AttentionMetadata, num_threads: int) -> CppStep:
    """``metadata`` as the kernels read it; a rotation is set where it is needed."""
    starts = np.array(metadata.query_start_loc, dtype=np.int64)
    seq_lens = np.array(metadata.seq_lens, dtype=np.int64)
    table, slots = metadata.block_table.contiguous(), metadata.slot_mapping.contiguous()
    assert table.dtype == slots.dtype == torch.int64
    native = NativeStep(
        num_tokens=metadata.query_start_loc[-1],
        num_requests=len(metadata.seq_lens),
        query_start_loc=starts.ctypes.data,
        seq_lens=seq_lens.ctypes.data,
        block_table=table.data_ptr(),
        table_stride=table.shape[1],
        slot_mapping=slots.data_ptr(),
        threads=num_threads,
    )
    return CppStep(native, metadata.block_size, (starts, seq_lens, table, slots))


def set_rotation(step: CppStep, rotation: Rotation) -> None:
    """Point ``step`` at ``rotation``, which the caller keeps alive."""
    for tensor in (rotation.cos_TH, rotation.sin_TH):
        assert tensor.is_contiguous()
        assert tensor.dtype == torch.float32
        assert tensor.shape[0] == step.native.num_tokens
    step.native.cos, step.native.sin = rotation.cos_TH.data_ptr(), rotation.sin_TH.data_ptr()


def build_kv_layer(kv_layer: Tensor) -> NativeKvLayer:
    """One layer of KV memory, [B, 2, K, S, H], its tokens' heads contiguous as they are in the pool."""
    _, _, _, block_size, head_dim = kv_layer.shape
    assert kv_layer.stride(4) == 1
    assert kv_layer.stride(3) == head_dim
    assert block_size & (block_size - 1) == 0
    assert kv_layer.dtype in (torch.bfloat16, torch.float32)
    return NativeKvLayer(
        kv_layer.data_ptr(),
        kv_layer.stride(0),
        kv_layer.stride(1),
        kv_layer.stride(2),
        block_size.bit_length() - 1,
        kv_layer.shape[0],
        int(kv_layer.dtype == torch.float32),
    )


def build_heads(num_heads: int, num_kv_heads: int, head_dim: int, scale: float) -> NativeHeads:
    """Sizes of attention."""
    assert num_heads % num_kv_heads == 0
    assert head_dim % 2 == 0
    return NativeHeads(num_heads, num_kv_heads, head_dim, scale)


class CppAttention:
    """One step's attention; see `pdserve.kernels.base.AttentionPlan`."""

    def __init__(self, library: ctypes.CDLL, step: CppStep, heads: NativeHeads) -> None:
        self._library = library
        self._step = step
        self._heads = heads

    def rotate_and_store(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, rotation: Rotation, kv_layer: Tensor
    ) -> Tensor:
        """See `pdserve.kernels.base.AttentionPlan.rotate_and_store`."""
        heads, num_tokens = self._heads, self._step.native.num_tokens
        q_TNH, k_TKH, v_TKH = (_require_heads(x) for x in (q_TNH, k_TKH, v_TKH))
        assert q_TNH.shape == (num_tokens, heads.num_heads, heads.head_dim)
        assert k_TKH.shape == v_TKH.shape == (num_tokens, heads.num_kv_heads, heads.head_dim)
        self._require_layer(kv_layer)
        set_rotation(self._step, rotation)
        projected = NativeProjected(
            q_TNH.data_ptr(), k_TKH.data_ptr(), v_TKH.data_ptr(), q_TNH.stride(0), k_TKH.stride(0), v_TKH.stride(0)
        )
        out_TNH = torch.empty(q_TNH.shape, dtype=torch.bfloat16)
        status = self._library.pds_rotate_and_store(
            byref(projected),
            byref(self._step.native),
            byref(build_kv_layer(kv_layer)),
            byref(heads),
            out_TNH.data_ptr(),
        )
        require_done(status)
        return out_TNH

    def attend(self, q_TNH: Tensor, kv_layer: Tensor) -> Tensor:
        """See `pdserve.kernels.base.AttentionPlan.attend`."""
        heads = self._heads
        assert q_TNH.dtype == torch.bfloat16
        assert q_TNH.shape == (self._step.native.num_tokens, heads.num_heads, heads.head_dim)
        self._require_layer(kv_layer)
        q_TNH = q_TNH.contiguous()
        out_TNH = torch.empty_like(q_TNH)
        status = self._library.pds_attend(
            q_TNH.data_ptr(),
            byref(self._step.native),
            byref(build_kv_layer(kv_layer)),
            byref(heads),
            out_TNH.data_ptr(),
        )
        require_done(status)
        return out_TNH

    def _require_layer(self, kv_layer: Tensor) -> None:
        heads = self._heads
        assert kv_layer.shape[2:] == (heads.num_kv_heads, self._step.block_size, heads.head_dim)


def _require_heads(x_TNH: Tensor) -> Tensor:
    """``x`` with each token's heads side by side."""
    assert x_TNH.dtype == torch.bfloat16
    adjacent = x_TNH.stride(2) == 1 and x_TNH.stride(1) == x_TNH.shape[2]
    return x_TNH if adjacent else x_TNH.contiguous()
