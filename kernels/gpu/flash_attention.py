"""Attention by flash-attn 2 over the block-major cache; the rest of a layer stays in Triton.

The library takes a paged cache whose blocks are [S, K, H] in any strides, if S is a multiple of 256, which the pool's
[K, S, H] blocks are a transposed view of: nothing is copied. It splits a long context by how busy the device is unless
told not to, which it is here; whether one row still gets the same bits beside others, it does not promise.
(https://github.com/Dao-AILab/flash-attention, ``flash_attn_with_kvcache``.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

from pdserve.errors import ConfigError
from pdserve.kernels.base import AttentionMetadata, AttentionPlan, Rotation
from pdserve.kernels.gpu.requirements import require_flash_attn

BLOCK_MULTIPLE = 256
DIM_MULTIPLE, MAX_DIM = 8, 256

FlashFunction = Callable[..., Tensor]
"""``flash_attn_with_kvcache``."""


@dataclass(frozen=True)
class FlashAttention:
    """The library: its function and its version."""

    function: FlashFunction
    version: str

    @classmethod
    def load(cls) -> FlashAttention:
        """Import it.

        Raises:
            ConfigError: it is missing or too old, or does not load beside this torch.
        """
        found = require_flash_attn()
        try:
            function: FlashFunction = import_module("flash_attn").flash_attn_with_kvcache
        except ImportError as error:
            raise ConfigError(f"kernel backend flash-attn: version {found} does not load: {error}") from error
        return cls(function, found)


@dataclass(frozen=True)
class _Group:
    """Requests with equally many tokens in this step: one call.

    Attributes:
        token_X: their packed tokens, request by request.
        num_requests: how many.
        seq_lens: [R'] int32.
        block_table: [R', M] int32.
    """

    token_X: Tensor
    num_requests: int
    seq_lens: Tensor
    block_table: Tensor


class FlashPlan:
    """See `pdserve.kernels.base.AttentionPlan`.

    Args:
        library: flash-attn.
        writer: rotates, and writes to the cache.
        metadata: the step.
        kv_cache: [B, L, 2, K, S, H].
        scale: what scores are multiplied by.

    Raises:
        ConfigError: the cache has a shape or dtype that the library does not take.
    """

    def __init__(
        self,
        library: FlashAttention,
        writer: AttentionPlan,
        metadata: AttentionMetadata,
        kv_cache: Tensor,
        scale: float,
    ) -> None:
        _require_taken(kv_cache)
        self._library = library
        self._writer = writer
        self._scale = scale
        self._groups = _build_groups(metadata, kv_cache.device)

    def rotate_and_store(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, rotation: Rotation, kv_layer: Tensor
    ) -> Tensor:
        """See `pdserve.kernels.base.AttentionPlan.rotate_and_store`."""
        return self._writer.rotate_and_store(q_TNH, k_TKH, v_TKH, rotation, kv_layer)

    def attend(self, q_TNH: Tensor, kv_layer: Tensor) -> Tensor:
        """See `pdserve.kernels.base.AttentionPlan.attend`."""
        keys_BSKH, values_BSKH = kv_layer.transpose(2, 3).unbind(1)
        out_TNH = torch.empty_like(q_TNH)
        for group in self._groups:
            q_RQNH = q_TNH[group.token_X].unflatten(0, (group.num_requests, -1))
            attended = self._library.function(
                q_RQNH,
                keys_BSKH,
                values_BSKH,
                cache_seqlens=group.seq_lens,
                block_table=group.block_table,
                softmax_scale=self._scale,
                causal=True,
                num_splits=1,
            )
            out_TNH[group.token_X] = attended.flatten(0, 1)
        return out_TNH


def _require_taken(kv_cache: Tensor) -> None:
    *_, block_size, head_dim = kv_cache.shape
    if kv_cache.dtype != torch.bfloat16:
        raise ConfigError(f"kernel backend flash-attn takes KV in bfloat16, not {kv_cache.dtype}; use triton")
    if block_size % BLOCK_MULTIPLE:
        raise ConfigError(
            f"kernel backend flash-attn takes blocks of a multiple of {BLOCK_MULTIPLE} tokens; block_size is "
            f"{block_size}: set it to {BLOCK_MULTIPLE}, or use triton"
        )
    if head_dim % DIM_MULTIPLE or head_dim > MAX_DIM:
        raise ConfigError(
            f"kernel backend flash-attn takes head sizes that are multiples of {DIM_MULTIPLE} up to {MAX_DIM}; this "
            f"model's is {head_dim}: use triton"
        )


def _build_groups(metadata: AttentionMetadata, device: torch.device) -> list[_Group]:
    starts = metadata.query_start_loc_array
    seq_lens_R = metadata.seq_lens_array.astype(np.int32)
    query_lens_R = np.diff(starts)
    groups = []
    for length in np.unique(query_lens_R):
        requests = np.flatnonzero(query_lens_R == length)
        token_X = (starts[requests, None] + np.arange(length)).reshape(-1)
        groups.append(
            _Group(
                token_X=torch.from_numpy(token_X).to(device),
                num_requests=len(requests),
                seq_lens=torch.from_numpy(seq_lens_R[requests]).to(device),
                block_table=metadata.block_table[torch.from_numpy(requests)].to(device, torch.int32),
            )
        )
    return groups
