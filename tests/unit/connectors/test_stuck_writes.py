"""A store whose write does not return: its hand-off fails in time, and others go on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator, Iterator, Sequence

import pytest
import torch

from pdserve.connectors.base import ConnectorOutput
from pdserve.connectors.blocks.block_format import BlockFormat
from pdserve.connectors.blocks.block_memory import BlockMemory
from pdserve.connectors.blocks.failures import Failure, WarningLimiter
from pdserve.connectors.blocks.messages import BlockTransfer, SaveRequest
from pdserve.connectors.blocks.saves import BlockSaver
from pdserve.connectors.blocks.staging import StagingPool
from pdserve.connectors.blocks.store import SealedBlock, WriteResult
from pdserve.connectors.blocks.task_threads import TaskThreads
from pdserve.connectors.testing import build_context
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.kv_layout import BlockKey
from pdserve.protocol import Role

NUM_SLOTS = 8


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class StuckStore:
    """Writes of one key wait for the gate."""

    place = "stuck"
    blocks_per_read = 1
    blocks_per_write = 1

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.is_stuck = threading.Event()
        self.stuck_digest = b""
        self.batches: list[int] = []

    def has(self, key: BlockKey) -> bool:
        return False

    def read(self, blocks: Sequence[BlockTransfer], memory: BlockMemory) -> Generator[Failure | None]:
        yield from ()

    def write(self, blocks: Sequence[SealedBlock]) -> list[WriteResult]:
        self.batches.append(len(blocks))
        for block in blocks:
            if block.key.digest == self.stuck_digest:
                self.is_stuck.set()
                assert self.gate.wait(60)
        return [WriteResult() for _ in blocks]

    def close(self) -> None:
        self.gate.set()


class Saving:
    """A saver with a clock of its own."""

    def __init__(self) -> None:
        self.clock, self.store = Clock(), StuckStore()
        context = build_context(Role.PREFILL, {})
        self.format = BlockFormat(context.identity, TINY_SPEC)
        self.staging = StagingPool(NUM_SLOTS, self.format.value_bytes, self.clock)
        self.threads = TaskThreads("kv-save", 2, spares_caller=True)
        warnings = WarningLimiter(logging.getLogger("stuck"), self.clock)
        self.saver = BlockSaver(
            self.store, self.format, self.staging, self.threads, warnings, timeout_s=60.0, clock=self.clock
        )
        self.memory = BlockMemory(torch.zeros((4, *TINY_SPEC.block_shape), dtype=torch.bfloat16), TINY_SPEC, "stuck")

    def save(self, request_id: str, *numbers: int) -> None:
        blocks = [BlockTransfer(digest_of(number), TINY_SPEC.block_size, number % 4) for number in numbers]
        self.saver.begin_step([SaveRequest(request_id, blocks)], self.memory)
        self.saver.save([SaveRequest(request_id, blocks)], self.memory)

    def wait_for_end(self, request_id: str) -> ConnectorOutput:
        report = self.saver.take_report([request_id])
        deadline = time.monotonic() + 60
        while request_id not in report.finished_sending:
            assert time.monotonic() < deadline
            time.sleep(0.001)
            report = self.saver.take_report([])
        return report


def digest_of(number: int) -> bytes:
    return bytes([number]) * 16


@pytest.fixture
def saving() -> Iterator[Saving]:
    saving = Saving()
    yield saving
    saving.store.close()
    assert saving.threads.close(60)
    saving.saver.close()


def test_a_write_that_does_not_return_fails_its_request_alone(saving: Saving, caplog: pytest.LogCaptureFixture) -> None:
    saving.store.stuck_digest = digest_of(2)
    saving.save("stuck", 1, 2, 3)
    assert saving.store.is_stuck.wait(60)
    assert not saving.saver.take_report(["stuck"]).finished_sending
    saving.clock.now += 4.9
    assert not saving.saver.take_report([]).finished_sending

    saving.save("other", 4, 5)  # goes on beside it, on the other thread
    other = saving.wait_for_end("other")
    assert (other.finished_sending, other.failed_sending) == ({"other"}, set())

    saving.clock.now += 5.1
    report = saving.saver.take_report([])
    assert (report.finished_sending, report.failed_sending) == ({"stuck"}, {"stuck"})
    assert report.stats.failures == {"timeout": 1}
    assert "stuck has not ended a write for 5 s" in caplog.text
    assert saving.staging.num_free == NUM_SLOTS - 1  # the thread that hangs keeps its own

    saving.store.gate.set()
    deadline = time.monotonic() + 60
    while saving.staging.num_free < NUM_SLOTS or saving.threads.num_asleep < 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    late = saving.saver.take_report([])
    assert (late.finished_sending, late.failed_sending) == (set(), set())  # once is enough
    assert late.stats.failures == {"late": 1}
    assert late.stats.num_blocks_saved == 1  # it is stored all the same


def test_whoever_waits_for_the_same_block_fails_in_its_own_time(saving: Saving) -> None:
    saving.store.stuck_digest = digest_of(1)
    saving.save("first", 1)
    assert saving.store.is_stuck.wait(60)
    saving.saver.take_report(["first"])
    saving.clock.now += 3.0
    saving.save("second", 1)
    saving.saver.take_report(["second"])
    saving.clock.now += 2.0
    assert saving.saver.take_report([]).failed_sending == {"first"}
    saving.clock.now += 3.0
    assert saving.saver.take_report([]).failed_sending == {"second"}


def test_a_write_that_ends_in_time_is_no_failure(saving: Saving) -> None:
    saving.store.stuck_digest = digest_of(2)
    saving.save("slow", 1, 2)
    assert saving.store.is_stuck.wait(60)
    saving.saver.take_report(["slow"])
    saving.clock.now += 4.0
    saving.store.gate.set()
    report = saving.wait_for_end("slow")
    assert (report.failed_sending, report.stats.failures) == (set(), {})


def test_writers_get_full_batches_and_at_a_steps_end_the_rest(saving: Saving) -> None:
    saving.store.blocks_per_write = 3
    saving.save("p", *range(7))
    report = saving.wait_for_end("p")
    assert (report.failed_sending, sorted(saving.store.batches)) == (set(), [1, 3, 3])


def test_who_waits_for_staging_memory_has_given_the_writers_theirs(saving: Saving) -> None:
    """More blocks than slots, and batches that no number of slots fills."""
    saving.store.blocks_per_write = 2 * NUM_SLOTS
    saving.save("p", *range(3 * NUM_SLOTS))
    report = saving.wait_for_end("p")
    assert (report.failed_sending, sum(saving.store.batches)) == (set(), 3 * NUM_SLOTS)
