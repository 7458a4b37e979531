from __future__ import annotations

import torch

from pdserve.kernels.base import AttentionMetadata


def test_build_describes_a_mixed_step() -> None:
    metadata = AttentionMetadata.build(
        query_lens=[1, 3, 2], seq_lens=[6, 3, 9], block_ids=[[7, 2], [5], [1, 8, 3, 6]], block_size=4
    )
    assert metadata.query_start_loc == (0, 1, 4, 6)
    assert metadata.seq_lens == (6, 3, 9)
    assert metadata.positions.tolist() == [5, 0, 1, 2, 7, 8]
    assert metadata.slot_mapping.tolist() == [2 * 4 + 1, 20, 21, 22, 8 * 4 + 3, 3 * 4]
    assert metadata.block_table.tolist() == [[7, 2, 0], [5, 0, 0], [1, 8, 3]]
    assert metadata.positions.dtype == metadata.slot_mapping.dtype == metadata.block_table.dtype == torch.int64


def test_build_takes_a_step_without_requests() -> None:
    metadata = AttentionMetadata.build([], [], [], 16)
    assert metadata.query_start_loc == (0,)
    assert metadata.positions.shape == (0,)
    assert metadata.block_table.shape == (0, 0)


def test_a_step_of_a_token_each() -> None:
    metadata = AttentionMetadata.build([1, 1, 1], [6, 1, 9], [[7, 2], [5], [1, 8, 3]], 4)
    assert metadata.query_start_loc == (0, 1, 2, 3)
    assert metadata.positions.tolist() == [5, 0, 8]
    assert metadata.slot_mapping.tolist() == [2 * 4 + 1, 20, 3 * 4]
