"""Attention of all requests that run one token: one batched product over (request, tile) items.

Items are scored in slices that fit a core's cache, then merged tile by tile; see `pdserve.kernels.tiles` for their
order and `pdserve.kernels.torch_plan` for the arithmetic.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.kv_rows import split_tiles
from pdserve.kernels.tiles import MAX_ITEM_BYTES, DecodeItems, Geometry


@dataclass(frozen=True)
class _Partials:
    """Views of what scoring leaves for some items, or for some requests' accumulated tiles.

    Attributes:
        maximum: [I, K, X, 1] largest score of each row.
        total: [I, K, X, 1] sum of exp(score - maximum).
        out: [I, K, X, H] values weighted with exp(score - maximum).
    """

    maximum: Tensor
    total: Tensor
    out: Tensor

    def select(self, start: int, stop: int) -> _Partials:
        """The items ``[start, stop)``."""
        return _Partials(self.maximum[start:stop], self.total[start:stop], self.out[start:stop])


@dataclass(frozen=True)
class _Slice:
    """Some consecutive items.

    Attributes:
        request_I: [I] request of each.
        row_ids: [I * tile_blocks] gathered rows.
        stale_rows: [X] gathered rows of H elements that hold no token.
        bias_IP: [I, 1, 1, P] float32, 0 or -inf.
        partials: where results go.
    """

    request_I: Tensor
    row_ids: Tensor
    stale_rows: Tensor
    bias_IP: Tensor
    partials: _Partials


class DecodeAttention:
    """One step's decode rows; holds the buffers that all layers reuse, and views of them.

    Args:
        items: what to compute.
        geometry: shapes.
        scale: what scores are multiplied by.
    """

    def __init__(self, items: DecodeItems, geometry: Geometry, scale: float) -> None:
        self._token_R = items.token_R
        self._geometry = geometry
        self._scale = scale
        num_requests, num_items = len(items.token_R), len(items.request_I)
        shape = (geometry.num_kv_heads, geometry.pad(geometry.group_size), geometry.head_dim)
        self._q_RKXH = torch.zeros((num_requests, *shape), dtype=torch.float32)
        self._q_RKGH = self._q_RKXH[:, :, : geometry.group_size]
        out_IKXH = torch.empty((num_items, *shape), dtype=torch.float32)
        max_IKX1, sum_IKX1 = (torch.empty((num_items, *shape[:2], 1), dtype=torch.float32) for _ in range(2))
        partials = _Partials(max_IKX1, sum_IKX1, out_IKXH)
        self._slices = _cut_items(items, geometry, partials)
        self._merged = partials.select(0, num_requests)
        self._merges = [
            (partials.select(0, stop - start), partials.select(start, stop))
            for start, stop in itertools.pairwise(items.tile_bounds[1:])
        ]

    def attend(self, q_TNH: Tensor, rows: Tensor, out_TNH: Tensor) -> None:
        """Write the decode rows' results into ``out``.

        Args:
            q_TNH: all queries of the step.
            rows: the layer's KV, see `flatten_blocks`.
            out_TNH: all results of the step.
        """
        self._q_RKGH.copy_(q_TNH.index_select(0, self._token_R).view(self._q_RKGH.shape))
        self._q_RKXH.mul_(self._scale)
        for part in self._slices:
            self._score(part, rows)
        for merged, tile in self._merges:
            _merge(merged, tile)
        result_RKXH = self._merged.out.div_(self._merged.total)
        out_RNH = result_RKXH[:, :, : self._geometry.group_size].reshape(len(self._token_R), *out_TNH.shape[1:])
        out_TNH.index_copy_(0, self._token_R, out_RNH.to(out_TNH.dtype))

    def _score(self, part: _Slice, rows: Tensor) -> None:
        """Maximum, sum and output of each of the slice's items."""
        results = part.partials
        num_rows, head_dim = results.out.shape[2:]
        loaded = rows.index_select(0, part.row_ids)
        loaded.view(-1, head_dim).index_fill_(0, part.stale_rows, 0)
        k, v = split_tiles(loaded, self._geometry)
        q = self._q_RKXH.index_select(0, part.request_I).view(-1, num_rows, head_dim)
        flat_scores = torch.bmm(q, k.transpose(1, 2))
        scores = flat_scores.view(*results.out.shape[:3], -1).add_(part.bias_IP)
        torch.amax(scores, -1, keepdim=True, out=results.maximum)
        scores.sub_(results.maximum).exp_()
        torch.sum(scores, -1, keepdim=True, out=results.total)
        torch.bmm(flat_scores, v, out=results.out.view(-1, num_rows, head_dim))


def _merge(merged: _Partials, tile: _Partials) -> None:
    """Merge a tile's items into the tiles before it."""
    new_max = torch.maximum(merged.maximum, tile.maximum)
    old_factor = merged.maximum.sub_(new_max).exp_()
    new_factor = tile.maximum.sub_(new_max).exp_()
    merged.out.mul_(old_factor).add_(tile.out.mul_(new_factor))
    merged.total.mul_(old_factor).add_(tile.total.mul_(new_factor))
    merged.maximum.copy_(new_max)


def _cut_items(items: DecodeItems, geometry: Geometry, partials: _Partials) -> list[_Slice]:
    step = max(1, MAX_ITEM_BYTES // (4 * geometry.num_kv_heads * geometry.tile_tokens * geometry.head_dim))
    num_items, tile_rows = len(items.request_I), 2 * geometry.num_kv_heads * geometry.tile_tokens
    slices = []
    for start in range(0, num_items, step):
        stop = min(start + step, num_items)
        first, last = torch.searchsorted(items.stale_rows, torch.tensor([start, stop]) * tile_rows).tolist()
        slices.append(
            _Slice(
                request_I=items.request_I[start:stop],
                row_ids=items.row_ids[start * geometry.tile_blocks : stop * geometry.tile_blocks],
                stale_rows=items.stale_rows[first:last] - start * tile_rows,
                bias_IP=items.bias_IP[start:stop],
                partials=partials.select(start, stop),
            )
        )
    return slices
