"""Checksums that are taken before their prompt is whole: which blocks, when, and what becomes of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash

pytest.importorskip("nixl")

from pdserve.connectors.base import KVRequest, ScheduledTokens, StepPlan
from pdserve.connectors.nixl.checksums import PromptChecksums
from pdserve.connectors.nixl.filled_blocks import FilledBlockWatch
from pdserve.connectors.nixl.messages import FilledBlocks
from pdserve.connectors.nixl.pool_memory import PoolMemory
from pdserve.connectors.testing.kv_content import TINY_SPEC

S = TINY_SPEC.block_size
NUM_BLOCKS = 8


class Desk:
    """Checksums of memory whose content changes meanwhile; a slice is of two blocks."""

    def __init__(self) -> None:
        kv_cache = torch.zeros((NUM_BLOCKS, *TINY_SPEC.block_shape), dtype=torch.bfloat16)
        self.rows = kv_cache.view(torch.uint8).reshape(NUM_BLOCKS, -1).numpy()
        self.rows[:] = np.arange(NUM_BLOCKS, dtype=np.uint8)[:, None]
        self.checksums = PromptChecksums(PoolMemory(kv_cache, TINY_SPEC), lambda seconds: None)
        self.checksums._blocks_in_slice = 2

    def finish(self, request_id: str, block_ids: list[int]) -> bytes:
        found: list[bytes] = []
        self.checksums.finish(request_id, block_ids, found.append)
        self.take_all()
        (checksums,) = found
        return checksums

    def take_all(self) -> None:
        while self.checksums:
            self.checksums.advance()

    def expect(self, *values: int) -> bytes:
        """Checksums of blocks that hold these values."""
        blocks = [bytes([value]) * TINY_SPEC.block_bytes for value in values]
        return np.array([xxhash.xxh3_64_intdigest(block) for block in blocks], dtype="<u8").tobytes()


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_filled_blocks_are_read_before_the_end_and_not_again(desk: Desk) -> None:
    desk.checksums.add("r", 0, [5, 1])
    desk.checksums.add("r", 2, [7])
    desk.take_all()
    desk.rows[5] = 99
    assert desk.finish("r", [5, 1, 7, 2]) == desk.expect(5, 1, 7, 2)
    assert desk.finish("r", [5, 1, 7, 2]) == desk.expect(99, 1, 7, 2)


def test_a_preempted_requests_blocks_are_read_anew(desk: Desk) -> None:
    desk.checksums.add("r", 0, [5, 1])
    desk.checksums.forget("r")
    desk.checksums.forget("never heard of")
    desk.take_all()
    desk.rows[5] = 99
    assert desk.finish("r", [5, 1]) == desk.expect(99, 1)


@pytest.mark.parametrize(("first_block", "block_ids"), [(1, [1, 5]), (0, [3, 5])])
def test_what_does_not_fit_together_is_read_anew(desk: Desk, first_block: int, block_ids: list[int]) -> None:
    desk.checksums.add("r", first_block, [1])
    desk.take_all()
    desk.rows[block_ids[0]] = 99
    assert desk.finish("r", block_ids) == desk.expect(99, 5)


def test_a_slice_at_a_time_and_the_prompt_that_was_filled_first_comes_first(desk: Desk) -> None:
    found: list[bytes] = []
    desk.checksums.add("growing", 0, [6])
    for name, block_ids in (("long", [5, 1, 7, 2, 3]), ("short", [4])):
        desk.checksums.finish(name, block_ids, found.append)
    num_found = []
    while desk.checksums:
        desk.checksums.advance()
        num_found.append(len(found))
    assert num_found == [0, 0, 0, 1, 2]
    assert found == [desk.expect(5, 1, 7, 2, 3), desk.expect(4)]
    desk.checksums.advance()
    assert len(found) == 2


def test_memory_that_cannot_be_read_costs_its_own_prompt(desk: Desk) -> None:
    found: list[bytes] = []
    desk.checksums.finish("bad", [NUM_BLOCKS], found.append)
    desk.checksums.finish("good", [1], found.append)
    with pytest.raises(IndexError):
        desk.checksums.advance()
    desk.take_all()
    assert found == [desk.expect(1)]


def plan(*steps: tuple[str, int, int]) -> StepPlan:
    """A step that goes on with requests of ten blocks: (name, tokens computed, tokens scheduled)."""
    return StepPlan(
        [
            ScheduledTokens(KVRequest(name, 10 * S, ()), range(100, 110), num_computed, num_scheduled)
            for name, num_computed, num_scheduled in steps
        ]
    )


def test_blocks_are_told_of_once_from_the_second_step_on() -> None:
    watch = FilledBlockWatch(S)
    told = [
        list(watch.find_new(plan(("r", num_computed, num_scheduled))))
        for num_computed, num_scheduled in ((S, 2 * S + 1), (3 * S + 1, S), (4 * S + 1, S - 2), (5 * S - 1, 5 * S))
    ]
    assert told == [[], [FilledBlocks("r", 0, [100, 101, 102])], [FilledBlocks("r", 3, [103])], []]


def test_steps_behind_the_prompt_tell_nothing() -> None:
    watch = FilledBlockWatch(S)
    assert list(watch.find_new(plan(("r", 0, 10 * S)))) == []
    assert list(watch.find_new(plan(("r", 10 * S, 1)))) == []
    assert list(watch.find_new(plan(("r", 10 * S + 1, 1)))) == []


def test_a_step_that_is_done_again_tells_nothing_twice() -> None:
    watch = FilledBlockWatch(S)
    told = [list(watch.find_new(plan(("r", num_computed, S)))) for num_computed in (0, 4 * S, 2 * S, 5 * S)]
    assert told == [[], [FilledBlocks("r", 0, [100, 101, 102, 103])], [], [FilledBlocks("r", 4, [104])]]


def test_a_request_that_comes_back_begins_anew() -> None:
    watch = FilledBlockWatch(S)
    assert not watch.forget("r")
    for num_computed in (0, 2 * S):
        list(watch.find_new(plan(("r", num_computed, S))))
    assert watch.forget("r")
    assert not watch.forget("r")
    assert list(watch.find_new(plan(("r", 3 * S, S)))) == []
    assert list(watch.find_new(plan(("r", 4 * S, S)))) == [FilledBlocks("r", 0, [100, 101, 102, 103])]
