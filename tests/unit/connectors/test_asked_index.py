"""Lookups with a scripted store and a clock: who waits, for how long, and for what the answer is good."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest

from pdserve.connectors.base import KVRequest
from pdserve.connectors.blocks.asked_index import AskedIndex, UnansweredError
from pdserve.connectors.blocks.failures import Failure
from pdserve.kv_layout import BlockKey

KEYS = [BlockKey(bytes([i]) * 16, 4) for i in range(8)]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class ScriptedLookup:
    """Holds some blocks; answers when it is let go."""

    place = "scripted"

    def __init__(self) -> None:
        self.stored = set(KEYS)
        self.failure: Failure | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.num_asked: list[int] = []
        self.is_closed = False

    def count_stored_run(self, keys: Sequence[BlockKey]) -> int:
        self.num_asked.append(len(keys))
        assert self.gate.wait(60)
        if self.failure is not None:
            raise UnansweredError(self.failure)
        return next((i for i, key in enumerate(keys) if key not in self.stored), len(keys))

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lookup() -> ScriptedLookup:
    return ScriptedLookup()


@pytest.fixture
def index(lookup: ScriptedLookup, clock: Clock) -> Iterator[AskedIndex]:
    index = AskedIndex(lookup, timeout_s=0.5, clock=clock)
    yield index
    lookup.gate.set()
    index.close()


def make_request(name: str = "r") -> KVRequest:
    return KVRequest(name, 4 * len(KEYS), KEYS)


def wait_for_answer(index: AskedIndex, request: KVRequest, start: int = 0) -> int:
    deadline = time.monotonic() + 30
    while (run := index.count_stored_run(request, start)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return run


def test_the_first_question_has_no_answer_yet(index: AskedIndex, lookup: ScriptedLookup) -> None:
    lookup.gate.clear()
    assert index.count_stored_run(make_request(), 0) is None
    assert index.count_stored_run(make_request(), 0) is None
    lookup.gate.set()
    assert wait_for_answer(index, make_request()) == 8
    assert lookup.num_asked == [8]


def test_the_run_ends_at_the_first_hole(index: AskedIndex, lookup: ScriptedLookup) -> None:
    lookup.stored.discard(KEYS[3])
    request = make_request()
    assert wait_for_answer(index, request, 0) == 3
    assert [wait_for_answer(index, request, start) for start in (1, 2, 3)] == [2, 1, 0]
    assert lookup.num_asked == [8]


def test_behind_a_hole_and_before_the_start_it_asks_anew(index: AskedIndex, lookup: ScriptedLookup) -> None:
    lookup.stored.discard(KEYS[3])
    request = make_request()
    assert wait_for_answer(index, request, 4) == 4
    assert wait_for_answer(index, request, 1) == 2
    assert wait_for_answer(index, request, 5) == 3
    assert lookup.num_asked == [4, 7, 3]


def test_behind_the_prompt_nothing_is_asked(index: AskedIndex, lookup: ScriptedLookup) -> None:
    assert index.count_stored_run(make_request(), 8) == 0
    assert index.count_stored_run(make_request(), 12) == 0
    assert lookup.num_asked == []


def test_an_answer_ages(index: AskedIndex, lookup: ScriptedLookup, clock: Clock) -> None:
    assert wait_for_answer(index, make_request()) == 8
    lookup.stored.clear()
    assert wait_for_answer(index, make_request()) == 8
    clock.now += 3
    assert wait_for_answer(index, make_request()) == 0


def test_an_admitted_request_is_forgotten(index: AskedIndex, lookup: ScriptedLookup) -> None:
    assert wait_for_answer(index, make_request()) == 8
    index.forget("r")
    index.forget("never seen")
    lookup.stored.clear()
    assert wait_for_answer(index, make_request()) == 0


def test_a_store_that_hangs_costs_the_deadline(index: AskedIndex, lookup: ScriptedLookup, clock: Clock) -> None:
    lookup.gate.clear()
    assert index.count_stored_run(make_request(), 0) is None
    clock.now += 0.51
    assert index.count_stored_run(make_request(), 0) == 0


def test_a_failing_store_is_left_alone_for_a_while(index: AskedIndex, lookup: ScriptedLookup, clock: Clock) -> None:
    lookup.failure = Failure("unreachable", "scripted")
    assert wait_for_answer(index, make_request("a")) == 0
    assert index.count_stored_run(make_request("b"), 0) == 0
    assert lookup.num_asked == [8]
    lookup.failure = None
    clock.now += 3
    assert wait_for_answer(index, make_request("c")) == 8


def test_closing_closes_the_store_too(index: AskedIndex, lookup: ScriptedLookup) -> None:
    index.close()
    assert lookup.is_closed


def test_an_answer_wakes_the_engine(index: AskedIndex) -> None:
    request, is_awake, answers = make_request(), threading.Event(), []

    def wake() -> None:
        answers.append(index.count_stored_run(request, 0))
        is_awake.set()

    index.set_wake_up(wake)
    index.count_stored_run(request, 0)
    assert is_awake.wait(30)
    assert answers == [len(KEYS)]
