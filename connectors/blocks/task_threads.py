"""A few daemon threads that run tasks in order of arrival, side by side on different cores where there are some."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from pdserve.connectors.blocks.cores import get_allowed_cores, get_core, place

logger = logging.getLogger(__name__)


def step_back(nice: int) -> None:
    """Let other threads, of this process too, go before the calling one on a core that they share.

    Args:
        nice: by how much; it has no effect outside Linux, where threads of a process have no niceness of their own.
    """
    if nice and sys.platform == "linux":
        thread_id = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread_id, os.getpriority(os.PRIO_PROCESS, thread_id) + nice)


class TaskThreads:
    """Threads with one queue.

    They are daemons: a disk that never answers must not keep a process from ending. Where there are several cores, each
    thread wakes on its share of those that the caller does not run on; who has none wakes on the caller's.

    Args:
        name: prefix of the threads' names.
        num_threads: how many; they start with the first task.
        nice: how far they step back for others, see `step_back`.
        spares_caller: who would wake on the caller's core sleeps on until `help_here`.
        is_placed: threads wake as said above; otherwise where the system likes.

    Attributes:
        num_threads: as given.
    """

    def __init__(
        self, name: str, num_threads: int, *, nice: int = 0, spares_caller: bool = False, is_placed: bool = True
    ) -> None:
        self._tasks: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._is_closed = False
        self.num_threads = num_threads
        self._nice = nice
        self._spares_caller = spares_caller
        self._name = name
        self._cores = get_allowed_cores() if is_placed else []
        self._threads: list[threading.Thread] = []
        self._asleep: list[_Sleeper] = []

    @property
    def num_asleep(self) -> int:
        """Threads that wait for tasks."""
        with self._lock:
            return len(self._asleep)

    def submit(self, *tasks: Callable[[], None]) -> None:
        """Run ``tasks`` soon; after `close`, drop them."""
        with self._lock:
            if self._is_closed:
                return
            if not self._threads:
                self._start()
            self._tasks.extend(tasks)
            self._wake(len(tasks), on_own_core=not self._spares_caller)

    def help_here(self) -> None:
        """Tasks wait, and the caller is about to leave its core to who still sleeps."""
        with self._lock:
            self._wake(len(self._tasks), on_own_core=True)

    def close(self, timeout_s: float) -> bool:
        """Drop what has not begun and wait for the rest; whether all of it ended in time. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._tasks.clear()
            self._wake(self.num_threads, on_own_core=True)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _start(self) -> None:
        for index in range(self.num_threads):
            thread = threading.Thread(target=self._run, args=(index,), name=f"{self._name}-{index}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self, index: int) -> None:
        step_back(self._nice)
        sleeper = _Sleeper(index)
        while (task := self._take(sleeper)) is not None:
            try:
                task()
            except Exception:
                logger.exception("a task of %s failed", threading.current_thread().name)
            del task  # a waiting thread keeps nothing alive

    def _take(self, sleeper: _Sleeper) -> Callable[[], None] | None:
        while True:
            with self._lock:
                if self._tasks:
                    return self._tasks.popleft()
                if self._is_closed:
                    return None
                self._asleep.append(sleeper)
            sleeper.sleep()

    def _wake(self, count: int, *, on_own_core: bool) -> None:
        core = get_core()
        others = [other for other in self._cores if other != core]
        for sleeper in sorted(self._asleep, key=lambda asleep: asleep.index)[:count]:
            share = others[sleeper.index :: self.num_threads]
            if share or on_own_core or not others:
                self._asleep.remove(sleeper)
                sleeper.wake(share or [core] if others else None)


class _Sleeper:
    """One thread's sleep; built on that thread."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._thread_id = threading.get_native_id()
        self._cores: list[int] | None = None
        self._gate = threading.Lock()
        self._gate.acquire()

    def sleep(self) -> None:
        """Until `wake`, also when that came first."""
        self._gate.acquire()

    def wake(self, cores: list[int] | None) -> None:
        """Called once for each `sleep`; on these cores, or where the system likes."""
        if cores is not None and cores != self._cores:
            place(self._thread_id, cores)
            self._cores = cores
        self._gate.release()
