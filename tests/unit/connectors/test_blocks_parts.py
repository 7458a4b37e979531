"""The small parts: back-off, warnings, staging memory, threads."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time

import pytest
import torch

from pdserve.connectors.blocks.block_memory import BlockMemory
from pdserve.connectors.blocks.cores import get_allowed_cores
from pdserve.connectors.blocks.failures import Backoff, WarningLimiter
from pdserve.connectors.blocks.staging import StagingPool
from pdserve.connectors.blocks.task_threads import TaskThreads
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.errors import ConfigError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_pauses_grow_to_ten_seconds_and_end_with_a_success() -> None:
    clock = Clock()
    backoff = Backoff(clock)
    pauses = []
    for _ in range(8):
        backoff.count_failure("io")
        backoff.count_failure("later")  # within the pause: changes nothing
        start = clock.now
        while backoff.get_reason() == "io":
            clock.now += 0.25
        pauses.append(clock.now - start)
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]
    backoff.count_success()
    backoff.count_failure("no_space")
    assert backoff.get_reason() == "no_space"
    clock.now += 0.25
    assert backoff.get_reason() is None


def test_one_warning_a_kind_and_half_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    limiter = WarningLimiter(logging.getLogger("kv-test"), clock)
    for _ in range(5):
        limiter.warn("io", "bad disk")
        limiter.warn("missing", "gone")
    clock.now = 30.0
    limiter.warn("io", "bad disk")
    assert [(r.getMessage(), r.kv["suppressed"]) for r in caplog.records] == [
        ("bad disk", 0),
        ("gone", 0),
        ("bad disk", 4),
    ]


def test_staging_gives_all_slots_then_waits_for_one() -> None:
    pool = StagingPool(2, 8, time.monotonic)
    slots = {pool.acquire(0.0), pool.acquire(0.0)}
    assert slots == {0, 1}
    assert pool.acquire(time.monotonic() + 0.01) is None
    waiter: list[int | None] = []
    thread = threading.Thread(target=lambda: waiter.append(pool.acquire(time.monotonic() + 60)))
    thread.start()
    pool.release(1)
    thread.join(30)
    assert waiter == [1]


def test_closing_staging_wakes_who_waits() -> None:
    pool = StagingPool(1, 8, time.monotonic)
    pool.acquire(0.0)
    waiter: list[int | None] = []
    thread = threading.Thread(target=lambda: waiter.append(pool.acquire(time.monotonic() + 60)))
    thread.start()
    pool.close()
    thread.join(30)
    assert waiter == [None]
    pool.release(0)
    assert pool.acquire(time.monotonic()) is None


def test_a_task_that_fails_is_logged_and_the_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    threads = TaskThreads("kv-test", 1)
    done = threading.Event()
    threads.submit(lambda: [].pop())
    threads.submit(done.set)
    assert done.wait(30)
    assert "a task of kv-test-0 failed" in caplog.text
    assert threads.close(30)
    threads.submit(lambda: pytest.fail("ran after close"))
    assert threads.close(0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells threads apart")
def test_nice_threads_let_others_go_first_and_nobody_else_does() -> None:
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    found: list[int] = []
    done = threading.Event()

    def look() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        done.set()

    threads = TaskThreads("kv-test", 1, nice=3)
    threads.submit(look)
    assert done.wait(30)
    assert threads.close(30)
    assert found == [min(before + 3, 19)]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


def run_where_threads_wake(threads: TaskThreads, num_tasks: int, *, helps: bool) -> list[set[int]]:
    """The cores that each of the tasks, which wait for each other, may run on."""
    cores: list[set[int]] = []
    together = threading.Barrier(num_tasks)

    def look() -> None:
        together.wait(30)
        cores.append(os.sched_getaffinity(0))
        together.wait(30)
        done.release()

    for is_warm in (False, True):  # threads that start are where the system puts them
        cores.clear()
        done = threading.Semaphore(0)
        threads.submit(*[look] * num_tasks)
        if helps and is_warm:
            threads.help_here()
        for _ in range(num_tasks):
            assert done.acquire(timeout=30)
        deadline = time.monotonic() + 30
        while threads.num_asleep < threads.num_threads:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    return cores


@pytest.mark.skipif(len(get_allowed_cores()) < 2, reason="there is one core")
@pytest.mark.parametrize("spares_caller", [False, True])
def test_threads_wake_on_different_cores(spares_caller: bool) -> None:
    threads = TaskThreads("kv-test", 2, spares_caller=spares_caller)
    first, second = run_where_threads_wake(threads, 2, helps=spares_caller)
    assert threads.close(30)
    assert first.isdisjoint(second)
    assert first | second <= set(get_allowed_cores())


@pytest.mark.skipif(len(get_allowed_cores()) != 2, reason="with more cores there is one for each")
def test_who_shares_the_callers_core_waits_until_it_is_left() -> None:
    threads = TaskThreads("kv-test", 2, spares_caller=True)
    run_where_threads_wake(threads, 2, helps=True)
    began, gate, others = threading.Event(), threading.Event(), threading.Event()
    threads.submit(lambda: (began.set(), gate.wait(30))[0])
    assert began.wait(30)
    threads.submit(others.set)
    assert threads.num_asleep == 1
    threads.help_here()  # one that hangs keeps no other from its tasks
    assert others.wait(30)
    gate.set()
    assert threads.close(30)


def test_closing_does_not_wait_for_ever() -> None:
    threads = TaskThreads("kv-test", 1)
    started, gate = threading.Event(), threading.Event()
    threads.submit(lambda: (started.set(), gate.wait())[0])
    assert started.wait(30)
    assert not threads.close(0.01)
    gate.set()
    assert threads.close(30)


def test_memory_of_another_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"connector mine: KV cache has blocks of shape .*expected"):
        BlockMemory(torch.zeros(2, 3, 2, 2, 4, 4, dtype=torch.bfloat16), TINY_SPEC, "mine")
    with pytest.raises(ConfigError, match="connector mine moves CPU memory"):
        BlockMemory(torch.zeros(2, *TINY_SPEC.block_shape, dtype=torch.bfloat16, device="meta"), TINY_SPEC, "mine")
