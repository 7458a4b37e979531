"""Reads step aside while the engine computes, and only then."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence

import pytest
import torch

from pdserve.connectors.blocks.block_memory import BlockMemory
from pdserve.connectors.blocks.failures import Failure
from pdserve.connectors.blocks.messages import BlockTransfer, LoadRequest, StepMetadata
from pdserve.connectors.blocks.options import TransferOptions
from pdserve.connectors.blocks.read_pace import ReadPace
from pdserve.connectors.blocks.store import SealedBlock, WriteResult
from pdserve.connectors.blocks.worker import StoreWorker
from pdserve.connectors.testing.kv_content import TINY_SPEC, build_context
from pdserve.kv_layout import BlockKey
from pdserve.protocol import Role

FORWARD_CORE, OTHER_CORE = 0, 1
SHORT_S, TURN_S = 0.0002, 0.0006
NUM_BLOCKS = 3


class Reader:
    """A thread whose processor time and core the test decides."""

    def __init__(self) -> None:
        self.busy_s = 10.0
        self.core = FORWARD_CORE
        self.pace = ReadPace(lambda: self.busy_s, lambda: self.core)
        self.pace.begin_step()
        self.core = OTHER_CORE

    def read(self, seconds: float) -> float:
        """Read a piece; the pause after it."""
        self.pace.begin_piece()
        self.busy_s += seconds
        return self.pace.get_pause_s()


@pytest.fixture
def reader() -> Reader:
    return Reader()


def test_there_is_a_pause_only_beside_a_forward_pass(reader: Reader) -> None:
    pauses_s = []
    for change in (reader.pace.begin_step, reader.pace.end_step, reader.pace.begin_step):
        change()
        pauses_s.append(reader.read(TURN_S) > 0)
        assert reader.pace.is_computing is pauses_s[-1]
    assert pauses_s == [True, False, True]


def test_who_has_a_core_takes_a_quarter_of_it_and_who_shares_the_forward_threads_a_twelfth(reader: Reader) -> None:
    assert reader.read(TURN_S) == pytest.approx(3 * TURN_S)
    reader.core = FORWARD_CORE
    assert reader.read(TURN_S) == pytest.approx(11 * TURN_S)
    assert reader.read(1.0) == 0.011  # however long a piece took


def test_where_cores_are_not_known_none_is_shared() -> None:
    reader = Reader()
    pace = ReadPace(lambda: reader.busy_s, lambda: -1)
    pace.begin_step()
    pace.begin_piece()
    reader.busy_s += TURN_S
    assert pace.get_pause_s() == pytest.approx(3 * TURN_S)


def test_short_pieces_make_one_turn_and_are_all_paid_for(reader: Reader) -> None:
    assert [reader.read(SHORT_S), reader.read(SHORT_S)] == [0.0, 0.0]
    reader.busy_s += 7.0  # what the thread does between pieces
    assert reader.read(SHORT_S) == pytest.approx(9 * SHORT_S)
    assert reader.read(SHORT_S) == 0.0


def test_what_was_read_beside_nothing_is_not_paid_for_later(reader: Reader) -> None:
    reader.read(SHORT_S)
    reader.pace.end_step()
    reader.read(100.0)
    reader.pace.begin_step()
    assert reader.read(SHORT_S) == 0.0


def test_each_thread_has_turns_of_its_own(reader: Reader) -> None:
    reader.read(2 * SHORT_S)
    pauses_s: list[float] = []
    thread = threading.Thread(target=lambda: pauses_s.append(reader.read(2 * SHORT_S)))
    thread.start()
    thread.join(30)
    assert pauses_s == [0.0]
    assert reader.read(2 * SHORT_S) == pytest.approx(12 * SHORT_S)


class SlowStore:
    """Each block takes a turn of processor time."""

    place = "nowhere"
    blocks_per_read = 8
    blocks_per_write = 1

    def read(self, blocks: Sequence[BlockTransfer], memory: BlockMemory) -> Generator[Failure | None]:
        for _ in blocks:
            began_s = time.thread_time()
            while time.thread_time() - began_s < TURN_S:
                pass
            yield None

    def has(self, key: BlockKey) -> bool:
        return False

    def write(self, blocks: Sequence[SealedBlock]) -> list[WriteResult]:
        return []

    def close(self) -> None:
        pass


def test_readers_pause_between_two_blocks_while_a_step_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses_s: list[float] = []
    monkeypatch.setattr("pdserve.connectors.blocks.loads.time.sleep", pauses_s.append)
    worker = StoreWorker("slow", build_context(Role.DECODE, {}), TransferOptions(reader_threads=1), SlowStore())
    has_ended = threading.Event()
    worker.set_wake_up(has_ended.set)
    worker.register_kv_caches(torch.zeros(NUM_BLOCKS, *TINY_SPEC.block_shape, dtype=torch.bfloat16), TINY_SPEC)
    blocks = [BlockTransfer(bytes([index] * 16), TINY_SPEC.block_size, index) for index in range(NUM_BLOCKS)]
    load = LoadRequest("r", NUM_BLOCKS * TINY_SPEC.block_size, blocks)
    for has_tokens in (True, False):
        worker.start_load_kv(StepMetadata([load], has_tokens=has_tokens))
        assert has_ended.wait(30)
        has_ended.clear()
        assert worker.get_finished([]).finished_receiving == {"r"}
        assert len(pauses_s) == NUM_BLOCKS - 1  # none after the last one, and none without tokens
    worker.close()
