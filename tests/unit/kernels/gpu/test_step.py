from __future__ import annotations

import pytest
import torch

from pdserve.kernels.base import AttentionMetadata
from pdserve.kernels.gpu.step import NO_SLOT, DeviceStep, StepShape, build_items

CPU = torch.device("cpu")


def test_items_cut_each_requests_tokens_from_its_first_one_on() -> None:
    metadata = AttentionMetadata.build([1, 7, 3], [9, 7, 20], [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10]], 4)
    assert build_items(metadata, 3).tolist() == [
        [0, 0, 1, 8],
        [1, 1, 3, 0],
        [1, 4, 3, 3],
        [1, 7, 1, 6],
        [2, 8, 3, 17],
    ]


def test_a_step_on_the_device_says_what_its_metadata_says() -> None:
    metadata = AttentionMetadata.build([1, 7], [9, 7], [[1, 2, 3], [4, 5]], 4)
    step = DeviceStep.build(metadata, 4, CPU)
    assert step.items.tolist() == build_items(metadata, 4).tolist()
    assert torch.equal(step.block_table, metadata.block_table)
    assert torch.equal(step.slot_mapping, metadata.slot_mapping)


def test_all_parts_lie_at_aligned_addresses() -> None:
    """A kernel would be compiled anew for others."""
    step = DeviceStep.build(AttentionMetadata.build([1, 1, 1], [9, 7, 1], [[1, 2, 3], [4, 5], [0]], 4), 4, CPU)
    assert step.block_table.shape == (3, 3)
    start = step.items.data_ptr()
    assert [(part.data_ptr() - start) % 16 for part in (step.block_table, step.slot_mapping)] == [0, 0]


def test_a_step_filled_again_keeps_nothing_of_the_one_before() -> None:
    step = DeviceStep(StepShape(num_items=4, num_requests=4, num_tokens=4, table_width=3), CPU)
    address = step.items.data_ptr()
    step.fill(AttentionMetadata.build([1] * 4, [9, 5, 2, 11], [[1, 2, 3], [4, 5], [6], [7, 8, 9]], 4))
    step.fill(AttentionMetadata.build([1, 1], [3, 6], [[2], [5, 7]], 4))
    assert step.items.data_ptr() == address
    assert step.items.tolist() == [[0, 0, 1, 2], [1, 1, 1, 5], [0, 2, 1, -1], [0, 3, 1, -1]]
    assert step.block_table.tolist() == [[2, 0, 0], [5, 7, 0], [0, 0, 0], [0, 0, 0]]
    assert step.slot_mapping.tolist() == [2 * 4 + 2, 7 * 4 + 1, NO_SLOT, NO_SLOT]


def test_a_step_larger_than_the_memory_is_refused() -> None:
    step = DeviceStep(StepShape(num_items=1, num_requests=1, num_tokens=1, table_width=1), CPU)
    with pytest.raises(RuntimeError, match="must match"):
        step.fill(AttentionMetadata.build([1, 1], [1, 1], [[0], [1]], 4))
