"""Paged attention in torch operations, exact for any batch, chunking and block order.

Online softmax over fixed key tiles (https://arxiv.org/abs/2205.14135). Within a tile j, for each row::

    m_j = max(s),  p = exp(s - m_j),  l_j = sum(p),  o_j = p @ V

and tiles are merged one after another, from position 0::

    M = max(M, m_j),  acc = acc * exp(M_old - M) + o_j * exp(m_j - M),  l likewise;  result acc / l

`DecodeAttention` and `ChunkAttention` do the same arithmetic on the same shapes of the summed axes; they differ only
in how many rows and tiles one call handles. A tile that a row doesn't see changes nothing, exactly: its p and o_j are
0 and the factors are 1 and 0. All of it is float32. Only operations whose result doesn't depend on an element's place
are used: torch's ``exp`` is one; ``exp2``, ``sigmoid`` and float32 ``silu`` are not (vector and scalar code differ).
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from pdserve.kernels.base import AttentionMetadata, Rotation
from pdserve.kernels.chunk_attention import ChunkAttention
from pdserve.kernels.decode_attention import DecodeAttention
from pdserve.kernels.kv_rows import flatten_blocks
from pdserve.kernels.tiles import DecodeItems, Geometry, build_chunks


class TorchPlan:
    """One step in torch operations; see `pdserve.kernels.base.AttentionPlan`."""

    def __init__(self, metadata: AttentionMetadata, kv_cache: Tensor, num_heads: int, scale: float) -> None:
        geometry = Geometry.build(kv_cache, num_heads)
        query_lens = [stop - start for start, stop in itertools.pairwise(metadata.query_start_loc)]
        single = [r for r, length in enumerate(query_lens) if length == 1]
        self._parts: list[DecodeAttention | ChunkAttention] = [
            ChunkAttention(chunk, geometry, scale)
            for r, length in enumerate(query_lens)
            if length > 1
            for chunk in build_chunks(metadata, r, geometry)
        ]
        if single:
            self._parts.append(DecodeAttention(DecodeItems.build(metadata, single, geometry), geometry, scale))
        self._block_T = metadata.slot_mapping // metadata.block_size
        self._offset_T = metadata.slot_mapping % metadata.block_size

    def rotate_and_store(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, rotation: Rotation, kv_layer: Tensor
    ) -> Tensor:
        """See `pdserve.kernels.base.AttentionPlan.rotate_and_store`."""
        rotated = _rotate(torch.cat((q_TNH, k_TKH), 1), rotation)
        q_rotated, k_rotated = torch.split(rotated, [q_TNH.shape[1], k_TKH.shape[1]], 1)
        kv_layer[:, 0][self._block_T, :, self._offset_T] = k_rotated.to(kv_layer.dtype)
        kv_layer[:, 1][self._block_T, :, self._offset_T] = v_TKH.to(kv_layer.dtype)
        return q_rotated.to(q_TNH.dtype)

    def attend(self, q_TNH: Tensor, kv_layer: Tensor) -> Tensor:
        """See `pdserve.kernels.base.AttentionPlan.attend`."""
        rows = flatten_blocks(kv_layer)
        out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
        for part in self._parts:
            part.attend(q_TNH, rows, out_TNH)
        return out_TNH


def _rotate(x_TNH: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each head by its token's position (https://arxiv.org/abs/2104.09864): float32."""
    half = x_TNH.shape[-1] // 2
    wide_TNH = x_TNH.float()
    swapped_TNH = torch.cat((wide_TNH[..., half:], wide_TNH[..., :half]), -1)
    swapped_TNH.mul_(rotation.sin_TH[:, None])
    return (wide_TNH * rotation.cos_TH[:, None]).add_(swapped_TNH)
