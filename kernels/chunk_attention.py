"""Attention of several tokens of one request, tile by tile; see `pdserve.kernels.torch_plan` for the arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.kernels.kv_rows import split_tiles
from pdserve.kernels.tiles import Chunk, ChunkTile, Geometry

LOWEST_MAX = -1e30
"""Stands for the maximum of a row that sees no key of a tile, so that exp(-inf - maximum) is 0, not NaN."""


class ChunkAttention:
    """One chunk of a step.

    Args:
        chunk: what to compute.
        geometry: shapes.
        scale: what scores are multiplied by.
    """

    def __init__(self, chunk: Chunk, geometry: Geometry, scale: float) -> None:
        self._chunk = chunk
        self._geometry = geometry
        self._scale = scale
        self._num_rows = (chunk.stop - chunk.start) * geometry.group_size
        shape = (geometry.num_kv_heads, geometry.pad(self._num_rows), geometry.head_dim)
        self._q_KXH = torch.zeros(shape, dtype=torch.float32)

    def attend(self, q_TNH: Tensor, rows: Tensor, out_TNH: Tensor) -> None:
        """Write the chunk's results into ``out``.

        Args:
            q_TNH: all queries of the step.
            rows: the layer's KV, see `flatten_blocks`.
            out_TNH: all results of the step.
        """
        part = slice(self._chunk.start, self._chunk.stop)
        self._by_head(self._q_KXH).copy_(self._by_token(q_TNH[part]))
        self._q_KXH.mul_(self._scale)
        first, *others = self._chunk.tiles
        maximum, total, acc = self._score(first, rows)
        for tile in others:
            tile_max, tile_sum, tile_out = self._score(tile, rows)
            old_max = maximum[:, tile.first_row :]
            new_max = torch.maximum(old_max, tile_max)
            old_factor = (old_max - new_max).exp_()
            new_factor = (tile_max - new_max).exp_()
            acc[:, tile.first_row :].mul_(old_factor).add_(tile_out.mul_(new_factor))
            total[:, tile.first_row :].mul_(old_factor).add_(tile_sum.mul_(new_factor))
            old_max.copy_(new_max)
        self._by_token(out_TNH[part]).copy_(self._by_head(acc.div_(total)))

    def _score(self, tile: ChunkTile, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maximum [K, X, 1], sum [K, X, 1] and output [K, X, H] of the rows from the tile's first one on."""
        k, v = split_tiles(rows.index_select(0, tile.row_ids), self._geometry)
        k[:, tile.num_valid :] = 0
        v[:, tile.num_valid :] = 0
        scores = torch.bmm(self._q_KXH[:, tile.first_row :], k.transpose(1, 2))
        if tile.bias_XP is not None:
            scores[:, : tile.bias_XP.shape[0]].add_(tile.bias_XP)
        maximum = scores.amax(-1, keepdim=True).clamp_(min=LOWEST_MAX)
        scores.sub_(maximum).exp_()
        return maximum, scores.sum(-1, keepdim=True), torch.bmm(scores, v)

    def _by_token(self, x_TNH: Tensor) -> Tensor:
        """[T, N, H] seen as [K, T, G, H]."""
        shape = (x_TNH.shape[0], self._geometry.num_kv_heads, self._geometry.group_size, self._geometry.head_dim)
        return x_TNH.view(shape).permute(1, 0, 2, 3)

    def _by_head(self, x_KXH: Tensor) -> Tensor:
        """[K, X, H], its padding left out, seen as [K, T, G, H]."""
        rows = x_KXH[:, : self._num_rows]
        return rows.view(rows.shape[0], -1, self._geometry.group_size, self._geometry.head_dim)
