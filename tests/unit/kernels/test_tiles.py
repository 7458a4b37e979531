from __future__ import annotations

import numpy as np
import pytest
import torch

from pdserve.kernels.base import AttentionMetadata
from pdserve.kernels.tiles import MAX_CHUNK_TOKENS, Chunk, DecodeItems, Geometry, build_chunks

NUM_LAYERS = 5


def build_geometry(num_heads: int = 6, num_kv_heads: int = 3, block_size: int = 16) -> Geometry:
    return Geometry.build(torch.empty(2, NUM_LAYERS, 2, num_kv_heads, block_size, 8), num_heads)


@pytest.mark.parametrize(("block_size", "tile_tokens"), [(1, 128), (16, 128), (64, 128), (256, 256)])
def test_a_tile_is_whole_blocks(block_size: int, tile_tokens: int) -> None:
    assert build_geometry(block_size=block_size).tile_tokens == tile_tokens


def build_decode(seq_lens: list[int]) -> tuple[AttentionMetadata, DecodeItems]:
    blocks = [list(range(100 * r, 100 * r + 40)) for r in range(len(seq_lens))]
    metadata = AttentionMetadata.build([1] * len(seq_lens), seq_lens, blocks, 16)
    return metadata, DecodeItems.build(metadata, list(range(len(seq_lens))), build_geometry())


def test_items_are_tile_major_longest_request_first() -> None:
    _, items = build_decode([130, 5, 300, 256])
    assert items.token_R.tolist() == [2, 3, 0, 1]
    assert items.tile_bounds == (0, 4, 7, 8)
    assert items.request_I.tolist() == [0, 1, 2, 3, 0, 1, 2, 0]


def test_items_gather_their_requests_blocks_and_mask_the_rest() -> None:
    seq_lens = [130, 5, 300, 256]
    metadata, items = build_decode(seq_lens)
    row_ids = items.row_ids.view(-1, 8)
    tiles = [(item, tile) for tile, bounds in enumerate([(0, 4), (4, 7), (7, 8)]) for item in range(*bounds)]
    for item, tile in tiles:
        request = int(items.token_R[items.request_I[item]])
        for column in range(8):
            block = tile * 8 + column
            expected = block if block * 16 < seq_lens[request] else 0
            assert row_ids[item, column] == metadata.block_table[request, expected] * NUM_LAYERS
        seen = items.bias_IP[item, 0, 0] == 0
        assert seen.tolist() == [tile * 128 + p < seq_lens[request] for p in range(128)]


def test_stale_rows_are_what_gathered_blocks_hold_behind_the_last_token() -> None:
    seq_lens = [130, 5, 300, 256]
    _, items = build_decode(seq_lens)
    stale = set(items.stale_rows.tolist())
    assert sorted(stale) == items.stale_rows.tolist()
    blocks = items.row_ids // NUM_LAYERS
    for row in range(len(blocks) * 6 * 16):
        gathered, token = row // (6 * 16), row % 16
        request, block = divmod(int(blocks[gathered]), 100)
        assert (row in stale) == (block * 16 + token >= seq_lens[request])


@pytest.mark.parametrize(("first", "stop"), [(0, 40), (120, 140), (127, 129), (128, 300), (5, 261)])
@pytest.mark.parametrize("num_heads", [3, 6, 9])
def test_chunk_tiles_show_each_row_exactly_the_keys_up_to_its_position(first: int, stop: int, num_heads: int) -> None:
    geometry = build_geometry(num_heads)
    metadata = AttentionMetadata.build([1, stop - first], [9, stop], [[0], list(range(1, 21))], 16)
    chunk = Chunk.build(metadata, 1, 1, 1 + stop - first, geometry)
    group = num_heads // 3
    seen = np.zeros(((stop - first) * group, len(chunk.tiles) * 128), dtype=bool)
    for j, tile in enumerate(chunk.tiles):
        assert tile.first_row % 4 == 0
        assert tile.num_valid == min(128, stop - j * 128)
        columns = seen[:, j * 128 : (j + 1) * 128]
        columns[tile.first_row :] = True
        if tile.bias_XP is not None:
            masked = tile.bias_XP.numpy() != 0
            columns[tile.first_row : tile.first_row + len(masked)][masked] = False
    positions = first + np.arange((stop - first) * group) // group
    assert (seen == (np.arange(seen.shape[1]) <= positions[:, None])).all()


def test_long_prompts_are_cut_into_bounded_chunks() -> None:
    metadata = AttentionMetadata.build([600], [700], [list(range(44))], 16)
    chunks = build_chunks(metadata, 0, build_geometry())
    assert [(chunk.start, chunk.stop) for chunk in chunks] == [(0, 256), (256, 512), (512, 600)]
    assert MAX_CHUNK_TOKENS == 256
    assert [len(chunk.tiles) for chunk in chunks] == [3, 5, 6]
