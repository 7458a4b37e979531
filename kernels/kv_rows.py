"""Reading KV blocks of one layer into float32 tiles.

A block is one span of memory, a layer's keys and values of it a span within: they are gathered together, as rows of
``2 * K * S * H`` elements, which is what memory reads fastest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.kernels.tiles import Geometry


def flatten_blocks(kv_layer: Tensor) -> Tensor:
    """A layer's KV [B, 2, K, S, H] as contiguous rows of 2 * K * S * H elements: block b is row ``b * L``.

    The rows between belong to the block's other layers; no row id points there.
    """
    width = kv_layer[0].numel()
    num_rows = (kv_layer.shape[0] - 1) * (kv_layer.stride(0) // width) + 1
    return kv_layer.as_strided((num_rows, width), (width, 1), kv_layer.storage_offset())


def split_tiles(loaded: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Gathered rows of whole tiles as keys and values: [tiles * K, P, H] float32 each."""
    width = geometry.block_size * geometry.head_dim
    loaded_IB2KW = loaded.view(-1, geometry.tile_blocks, 2, geometry.num_kv_heads, width)
    shape = (loaded_IB2KW.shape[0], geometry.num_kv_heads, geometry.tile_blocks, width)
    k, v = (
        torch.empty(shape, dtype=torch.float32).copy_(loaded_IB2KW[:, :, which].transpose(1, 2)) for which in (0, 1)
    )
    tile_shape = (-1, geometry.tile_tokens, geometry.head_dim)
    return k.view(tile_shape), v.view(tile_shape)
