"""Paged attention in torch operations, exact for any batch, chunking and block order.

Online softmax over fixed key tiles (https://arxiv.org/abs/2205.14135). Within a tile j, for each row::

    m_j = max(s),  p = exp(s - m_j),  l_j = sum(p),  o_j = p @ V

and tiles are merged one after another, from position 0::

    M = max(M, m_j),  acc = acc * exp(M_old - M) + o_j * exp(m_j - M),  l likewise;  result acc / l

The decode path and the chunk path do the same arithmetic on the same shapes of the summed axes; they differ only in
how many rows and tiles one call handles. A tile that a row doesn't see changes nothing, exactly: p and o_j are 0
and both factors are 1 and 0. All of it is float32. Only operations whose result doesn't depend on an element's place
are used: torch's ``exp`` is one, ``exp2``, ``sigmoid`` and float32 ``silu`` are not (vector and scalar code differ).
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.base import AttentionMetadata
from pdserve.kernels.tiles import MAX_ITEM_BYTES, Chunk, DecodeItems, Geometry, build_chunks

LOWEST_MAX = -1e30
"""Stands for the maximum of a row that sees no key of a tile, so that exp(-inf - maximum) is 0, not NaN."""


class TiledAttention:
    """One step's attention; see `pdserve.kernels.base.AttentionPlan`."""

    def __init__(self, metadata: AttentionMetadata, kv_cache: Tensor, num_heads: int, scale: float) -> None:
        self._geometry = Geometry.build(kv_cache, num_heads)
        self._scale = scale
        starts = metadata.query_start_loc
        query_lens = [stop - start for start, stop in itertools.pairwise(starts)]
        single = [r for r, length in enumerate(query_lens) if length == 1]
        self._items = DecodeItems.build(metadata, single, self._geometry) if single else None
        self._slices = self._cut_items(self._items) if self._items else []
        self._keep_I = self._build_keep_bits(self._items, kv_cache.dtype) if self._items else None
        self._chunks = [
            chunk
            for r, length in enumerate(query_lens)
            if length > 1
            for chunk in build_chunks(metadata, r, self._geometry)
        ]

    def attend(self, q_TNH: Tensor, kv_layer: Tensor) -> Tensor:
        """See `pdserve.kernels.base.AttentionPlan.attend`."""
        keys, values = _flatten_blocks(kv_layer, 0), _flatten_blocks(kv_layer, 1)
        scaled_TNH = q_TNH.float() * self._scale
        out_TNH = torch.empty_like(q_TNH)
        if self._items is not None:
            rows = self._attend_items(self._items, scaled_TNH[self._items.token_R], keys, values)
            out_TNH[self._items.token_R] = rows.to(out_TNH.dtype)
        for chunk in self._chunks:
            part = slice(chunk.start, chunk.stop)
            out_TNH[part] = self._attend_chunk(chunk, scaled_TNH[part], keys, values)
        return out_TNH

    # --- decode rows: every (request, tile) pair is an item of one batched product ---

    def _attend_items(self, items: DecodeItems, q_RNH: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        geometry = self._geometry
        num_requests, num_heads, head_dim = q_RNH.shape
        num_items, heads = len(items.request_I), geometry.num_kv_heads
        q_RKGH = q_RNH.view(num_requests, heads, geometry.group_size, head_dim)
        num_rows = geometry.pad(geometry.group_size)
        q_RKXH = functional.pad(q_RKGH, (0, 0, 0, num_rows - geometry.group_size))
        max_IKX1 = q_RNH.new_empty(num_items, heads, num_rows, 1)
        sum_IKX1 = torch.empty_like(max_IKX1)
        out_IKXH = q_RNH.new_empty(num_items, heads, num_rows, head_dim)
        for part in self._slices:
            self._score_items(items, part, q_RKXH, keys, values, (max_IKX1, sum_IKX1, out_IKXH))
        acc, total = _merge_items(items.tile_bounds, max_IKX1, sum_IKX1, out_IKXH)
        return acc.div_(total)[:, :, : geometry.group_size].reshape(num_requests, num_heads, head_dim)

    def _score_items(
        self,
        items: DecodeItems,
        part: slice,
        q_RKXH: Tensor,
        keys: Tensor,
        values: Tensor,
        results: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Fill ``results`` (maximum, sum, output of each item and row) for the items in ``part``."""
        assert self._keep_I is not None
        max_IKX1, sum_IKX1, out_IKXH = (result[part] for result in results)
        num_items, heads, num_rows, head_dim = out_IKXH.shape
        per_item = heads * self._geometry.tile_blocks
        row_ids = items.row_ids[part.start * per_item : part.stop * per_item]
        keep = self._keep_I[part]
        q = q_RKXH.index_select(0, items.request_I[part]).view(-1, num_rows, head_dim)
        k = self._load_items(keys, row_ids, keep)
        scores = torch.bmm(q, k.transpose(1, 2)).view(num_items, heads, num_rows, -1)
        scores.add_(items.bias_IP[part])
        torch.amax(scores, -1, keepdim=True, out=max_IKX1)
        scores.sub_(max_IKX1).exp_()
        torch.sum(scores, -1, keepdim=True, out=sum_IKX1)
        v = self._load_items(values, row_ids, keep)
        torch.bmm(scores.view(-1, num_rows, v.shape[1]), v, out=out_IKXH.view(-1, num_rows, head_dim))

    def _load_items(self, blocks: Tensor, row_ids: Tensor, keep: Tensor) -> Tensor:
        """Keys or values of some items: [I * K, P, H] float32, zero where a token doesn't exist.

        What lies behind a request's last token may be NaN, so it is cleared by its bits, not multiplied away.
        """
        geometry = self._geometry
        tile = blocks.index_select(0, row_ids)
        bits = tile.view(keep.dtype).view(-1, geometry.num_kv_heads, geometry.tile_tokens, geometry.head_dim)
        bits.bitwise_and_(keep)
        return tile.view(-1, geometry.tile_tokens, geometry.head_dim).float()

    def _cut_items(self, items: DecodeItems) -> list[slice]:
        geometry = self._geometry
        item_bytes = 4 * geometry.num_kv_heads * geometry.tile_tokens * geometry.head_dim
        step = max(1, MAX_ITEM_BYTES // item_bytes)
        count = len(items.request_I)
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]

    def _build_keep_bits(self, items: DecodeItems, kv_dtype: torch.dtype) -> Tensor:
        """[I, 1, P, 1] integers as wide as a KV element: all bits set where a token exists, none where not."""
        bits = torch.int16 if kv_dtype.itemsize == 2 else torch.int32
        exists_IP = torch.arange(self._geometry.tile_tokens) < items.num_valid_I[:, None]
        return exists_IP.to(bits).neg_()[:, None, :, None]

    # --- chunks: the tokens of one request, tile by tile ---

    def _attend_chunk(self, chunk: Chunk, q_TNH: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        geometry = self._geometry
        num_tokens, num_heads, head_dim = q_TNH.shape
        num_rows = num_tokens * geometry.group_size
        q_KXH = q_TNH.new_zeros(geometry.num_kv_heads, geometry.pad(num_rows), head_dim)
        q_TKGH = q_TNH.view(num_tokens, geometry.num_kv_heads, geometry.group_size, head_dim)
        q_KTGH = q_KXH[:, :num_rows].view(geometry.num_kv_heads, num_tokens, geometry.group_size, head_dim)
        q_KTGH.copy_(q_TKGH.permute(1, 0, 2, 3))
        acc = total = maximum = q_KXH  # replaced by the first tile, which every row sees
        for index, tile in enumerate(chunk.tiles):
            k = self._load_tile(keys, tile.row_ids, tile.num_valid)
            scores = torch.bmm(q_KXH[:, tile.first_row :], k.transpose(1, 2))
            if tile.bias_XP is not None:
                scores[:, : tile.bias_XP.shape[0]].add_(tile.bias_XP)
            tile_max = scores.amax(-1, keepdim=True).clamp_(min=LOWEST_MAX)
            scores.sub_(tile_max).exp_()
            tile_sum = scores.sum(-1, keepdim=True)
            tile_out = torch.bmm(scores, self._load_tile(values, tile.row_ids, tile.num_valid))
            if index == 0:
                acc, total, maximum = tile_out, tile_sum, tile_max
                continue
            seen = slice(tile.first_row, None)
            new_max = torch.maximum(maximum[:, seen], tile_max)
            old_factor = torch.exp(maximum[:, seen] - new_max)
            new_factor = tile_max.sub_(new_max).exp_()
            acc[:, seen].mul_(old_factor).add_(tile_out.mul_(new_factor))
            total[:, seen].mul_(old_factor).add_(tile_sum.mul_(new_factor))
            maximum[:, seen] = new_max
        out_KTGH = acc.div_(total)[:, :num_rows].view_as(q_KTGH)
        return out_KTGH.permute(1, 0, 2, 3).reshape(num_tokens, num_heads, head_dim)

    def _load_tile(self, blocks: Tensor, row_ids: Tensor, num_valid: int) -> Tensor:
        """Keys or values of one tile: [K, P, H] float32, zero where a token doesn't exist."""
        geometry = self._geometry
        tile = blocks.index_select(0, row_ids).view(-1, geometry.tile_tokens, geometry.head_dim)
        tile[:, num_valid:] = 0
        return tile.float()


def _merge_items(
    tile_bounds: tuple[int, ...], max_IKX1: Tensor, sum_IKX1: Tensor, out_IKXH: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge each request's items, tile by tile, into outputs [R, K, X, H] and sums [R, K, X, 1]."""
    num_requests = tile_bounds[1]
    acc, total, maximum = out_IKXH[:num_requests], sum_IKX1[:num_requests], max_IKX1[:num_requests]
    for start, stop in itertools.pairwise(tile_bounds[1:]):
        seen, part = slice(0, stop - start), slice(start, stop)
        new_max = torch.maximum(maximum[seen], max_IKX1[part])
        old_factor = torch.exp(maximum[seen] - new_max)
        new_factor = max_IKX1[part].sub_(new_max).exp_()
        acc[seen].mul_(old_factor).add_(out_IKXH[part].mul_(new_factor))
        total[seen].mul_(old_factor).add_(sum_IKX1[part].mul_(new_factor))
        maximum[seen] = new_max
    return acc, total


def _flatten_blocks(kv_layer: Tensor, which: int) -> Tensor:
    """Keys (0) or values (1) of a layer as rows of S * H elements: head k of block b is row b * rows_per_block + k.

    Rows between a block's heads and the next block's belong to other layers; no row id points there.
    """
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_layer.shape
    width = block_size * head_dim
    num_rows = (num_blocks - 1) * (kv_layer.stride(0) // width) + num_kv_heads
    offset = kv_layer.storage_offset() + which * kv_layer.stride(1)
    return kv_layer.as_strided((num_rows, width), (width, 1), offset)
