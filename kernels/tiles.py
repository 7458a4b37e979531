"""How one step's attention is cut into key tiles of a fixed size; plain index arithmetic, once a step.

A request's keys are cut into tiles of `TILE_TOKENS` from position 0, whatever its length, so the order of every sum
depends on positions alone. There are two kinds of work::

    decode rows (one token each): a flat list of (request, tile) items, tile-major, longest request first
        tile 0: r0 r1 r2 r3 | tile 1: r0 r1 r2 | tile 2: r0        so each tile's items are a prefix of the requests

    chunks (more tokens of one request): for each tile, the rows that see any of its keys
        rows   ┌ tile 0 ┬ tile 1 ┬ tile 2 ┐
         t0    │ ▓▓▓▓▓▓ │ ▓░     │        │     ▓ seen, ░ masked, blank skipped
         t1    │ ▓▓▓▓▓▓ │ ▓▓▓▓▓▓ │ ▓▓░    │

Query heads that share a KV head are folded into rows, token-major: row = token * G + head of the group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.kernels.base import AttentionMetadata

TILE_TOKENS = 128
ROW_MULTIPLE = 4
"""float32 products of MKL give equal rows for any multiple of 4 rows (measured, 1 to 3 threads)."""
MAX_CHUNK_TOKENS = 256
MAX_ITEM_BYTES = 1 << 20
"""Of float32 keys worked on at once: with the values and scores, about what a core's cache holds."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Geometry:
    """Shapes that all tiles share.

    Attributes:
        num_kv_heads: K.
        group_size: G, query heads for each KV head.
        head_dim: H.
        block_size: S.
        num_layers: L, which is also how many of a layer's rows (keys and values of one block) a block is long.
        tile_blocks: blocks in a key tile.
    """

    num_kv_heads: int
    group_size: int
    head_dim: int
    block_size: int
    num_layers: int
    tile_blocks: int

    @classmethod
    def build(cls, kv_cache: Tensor, num_heads: int) -> Geometry:
        """Geometry of ``kv_cache`` [B, L, 2, K, S, H] under N query heads."""
        _, num_layers, _, num_kv_heads, block_size, head_dim = kv_cache.shape
        return cls(
            num_kv_heads=num_kv_heads,
            group_size=num_heads // num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            num_layers=num_layers,
            tile_blocks=max(1, TILE_TOKENS // block_size),
        )

    @property
    def tile_tokens(self) -> int:
        """Keys in a tile."""
        return self.tile_blocks * self.block_size

    def num_tiles(self, num_tokens: int) -> int:
        """Tiles that ``num_tokens`` keys occupy."""
        return -(-num_tokens // self.tile_tokens)

    def pad(self, num_rows: int) -> int:
        """``num_rows`` rounded up to what products need."""
        return -(-num_rows // ROW_MULTIPLE) * ROW_MULTIPLE

    def build_row_ids(self, blocks: IntArray) -> Tensor:
        """Where a layer's rows of ``blocks`` lie, flat; see `pdserve.kernels.kv_rows`."""
        return torch.from_numpy(blocks.reshape(-1) * self.num_layers)


@dataclass(frozen=True)
class DecodeItems:
    """All decode rows of a step as (request, tile) items.

    Where a tile has more blocks than its request, the request's first block stands in: masked like any key that
    doesn't exist, but finite, so that nothing has to be cleared.

    Attributes:
        token_R: [R] int64 index of each request's token among the packed ones, longest context first.
        request_I: [I] int64 request of each item, an index into ``token_R``.
        tile_bounds: item ``tile_bounds[j]`` is the first of tile j.
        row_ids: [I * tile_blocks] int64, see `Geometry.build_row_ids`.
        stale_rows: [X] int64 rows of H elements, of what ``row_ids`` gathers, that hold no token; sorted.
        bias_IP: [I, 1, 1, P] float32, 0 where a key exists and -inf where not.
    """

    token_R: Tensor
    request_I: Tensor
    tile_bounds: tuple[int, ...]
    row_ids: Tensor
    stale_rows: Tensor
    bias_IP: Tensor

    @classmethod
    def build(cls, metadata: AttentionMetadata, requests: list[int], geometry: Geometry) -> DecodeItems:
        """Items of ``requests``, which have one token each in this step."""
        tile, size = geometry.tile_tokens, geometry.block_size
        order = sorted(requests, key=lambda r: -metadata.seq_lens[r])
        lens_R = np.array([metadata.seq_lens[r] for r in order])
        tiles_R = -(-lens_R // tile)
        active = [int((tiles_R > j).sum()) for j in range(int(tiles_R[0]))]
        request_I = np.concatenate([np.arange(count) for count in active])
        tile_I = np.repeat(np.arange(len(active)), active)
        block_IB = tile_I[:, None] * geometry.tile_blocks + np.arange(geometry.tile_blocks)
        lens_I = lens_R[request_I][:, None]
        block_IB = np.where(block_IB * size < lens_I, block_IB, 0)
        table = metadata.block_table.numpy()[order]
        valid_IB = np.minimum(lens_I - block_IB * size, size)
        exists_IP = np.arange(tile) < lens_I - tile_I[:, None] * tile
        return cls(
            token_R=torch.tensor([metadata.query_start_loc[r] for r in order]),
            request_I=torch.from_numpy(request_I),
            tile_bounds=(0, *np.cumsum(active).tolist()),
            row_ids=geometry.build_row_ids(table[request_I[:, None], block_IB]),
            stale_rows=_find_stale_rows(valid_IB.reshape(-1), geometry),
            bias_IP=torch.from_numpy(np.where(exists_IP, np.float32(0), np.float32(-np.inf))[:, None, None, :]),
        )


def _find_stale_rows(valid_X: IntArray, geometry: Geometry) -> Tensor:
    """Rows of H elements that hold no token in gathered blocks of which ``valid`` [X] tokens exist."""
    block_Y, offset_Y = np.nonzero(np.arange(geometry.block_size) >= valid_X[:, None])
    spans = 2 * geometry.num_kv_heads
    rows_YK = (block_Y[:, None] * spans + np.arange(spans)) * geometry.block_size + offset_Y[:, None]
    return torch.from_numpy(np.sort(rows_YK.reshape(-1)))


@dataclass(frozen=True)
class ChunkTile:
    """One key tile as a chunk sees it.

    Attributes:
        row_ids: see `Geometry.build_row_ids`.
        num_valid: keys of the tile that exist.
        first_row: rows before it see no key of this tile.
        bias_XP: [X, P] float32, 0 or -inf, for the X rows from ``first_row`` on that don't see all keys; or None.
    """

    row_ids: Tensor
    num_valid: int
    first_row: int
    bias_XP: Tensor | None


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one request: packed tokens ``[start, stop)`` and the tiles that they see."""

    start: int
    stop: int
    tiles: tuple[ChunkTile, ...]

    @classmethod
    def build(cls, metadata: AttentionMetadata, request: int, start: int, stop: int, geometry: Geometry) -> Chunk:
        """The chunk of packed tokens ``[start, stop)`` of ``request``."""
        tile = geometry.tile_tokens
        behind = metadata.query_start_loc[request + 1] - start
        first = metadata.seq_lens[request] - behind
        last = first + stop - start - 1
        num_tiles = geometry.num_tiles(last + 1)
        table = metadata.block_table.numpy()[request : request + 1]
        blocks = _pad_columns(table, num_tiles * geometry.tile_blocks).reshape(num_tiles, -1)
        tiles = []
        for j in range(num_tiles):
            first_row = max(0, j * tile - first) * geometry.group_size // ROW_MULTIPLE * ROW_MULTIPLE
            stop_row = min(stop - start, max(0, (j + 1) * tile - 1 - first)) * geometry.group_size
            tiles.append(
                ChunkTile(
                    row_ids=geometry.build_row_ids(blocks[j : j + 1]),
                    num_valid=min(tile, metadata.seq_lens[request] - j * tile),
                    first_row=first_row,
                    bias_XP=_build_causal_bias(first, first_row, stop_row, j, geometry),
                )
            )
        return cls(start, stop, tuple(tiles))


def build_chunks(metadata: AttentionMetadata, request: int, geometry: Geometry) -> list[Chunk]:
    """All of a request's tokens of this step, in chunks that bound the size of what is worked on."""
    begin, end = metadata.query_start_loc[request], metadata.query_start_loc[request + 1]
    return [
        Chunk.build(metadata, request, start, min(start + MAX_CHUNK_TOKENS, end), geometry)
        for start in range(begin, end, MAX_CHUNK_TOKENS)
    ]


def _build_causal_bias(first: int, first_row: int, stop_row: int, tile: int, geometry: Geometry) -> Tensor | None:
    if stop_row <= first_row:
        return None
    position_X = first + np.arange(first_row, stop_row) // geometry.group_size
    key_P = tile * geometry.tile_tokens + np.arange(geometry.tile_tokens)
    seen_XP = key_P <= position_X[:, None]
    return torch.from_numpy(np.where(seen_XP, np.float32(0), np.float32(-np.inf)))


def _pad_columns(table: IntArray, width: int) -> IntArray:
    """``table`` with exactly ``width`` columns; block 0 stands where there is none, its content is never used."""
    if table.shape[1] >= width:
        return table[:, :width]
    return np.pad(table, ((0, 0), (0, width - table.shape[1])))
