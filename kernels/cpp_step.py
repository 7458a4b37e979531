"""A step and KV memory as the C++ kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pdserve.kernels.base import AttentionMetadata, Rotation
from pdserve.kernels.native_library import NativeHeads, NativeKvLayer, NativeStep


@dataclass(frozen=True)
class CppStep:
    """A step's structure, all int64; see `pdserve.kernels.base.AttentionMetadata`."""

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor

    @classmethod
    def of(cls, metadata: AttentionMetadata) -> CppStep:
        """``metadata`` in memory that the kernels can read."""
        return cls(
            torch.from_numpy(metadata.query_start_loc_array),
            torch.from_numpy(metadata.seq_lens_array),
            metadata.block_table.contiguous(),
            metadata.slot_mapping.contiguous(),
        )

    def build_native(self, num_threads: int) -> NativeStep:
        """The step as the kernels read it, which points into it; a rotation is set where it is needed."""
        for tensor in (self.query_start_loc, self.seq_lens, self.block_table, self.slot_mapping):
            assert tensor.dtype == torch.int64
            assert tensor.is_contiguous()
        return NativeStep(
            num_tokens=self.slot_mapping.shape[0],
            num_requests=self.seq_lens.shape[0],
            query_start_loc=self.query_start_loc.data_ptr(),
            seq_lens=self.seq_lens.data_ptr(),
            block_table=self.block_table.data_ptr(),
            table_stride=self.block_table.shape[1],
            slot_mapping=self.slot_mapping.data_ptr(),
            threads=num_threads,
        )


def build_step(metadata: AttentionMetadata, num_threads: int) -> NativeStep:
    """A step as `CppDecoder` gives it to the kernels, which find the slots themselves; it points into ``metadata``."""
    arrays = metadata.query_start_loc_array, metadata.seq_lens_array, metadata.block_table_array
    for array in arrays:
        assert array.dtype == np.int64
        assert array.flags.c_contiguous
    query_start_loc, seq_lens, block_table = (torch.from_numpy(array).data_ptr() for array in arrays)
    return NativeStep(
        num_tokens=int(metadata.query_start_loc_array[-1]),
        num_requests=len(metadata.seq_lens_array),
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=block_table,
        table_stride=metadata.block_table_array.shape[1],
        threads=num_threads,
    )


def set_rotation(step: NativeStep, rotation: Rotation) -> None:
    """Point ``step`` at ``rotation``, which the caller keeps alive."""
    for tensor in (rotation.cos_TH, rotation.sin_TH):
        assert tensor.is_contiguous()
        assert tensor.dtype == torch.float32
        assert tensor.shape[0] == step.num_tokens
    step.cos, step.sin = rotation.cos_TH.data_ptr(), rotation.sin_TH.data_ptr()


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
