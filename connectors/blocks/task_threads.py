"""A few daemon threads that run tasks in order of arrival."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable

logger = logging.getLogger(__name__)

# The shortest there is, some 50 µs: it ends the turn of a thread that steps back. Otherwise the system lets it run
# to the end of a tick, which is 4 ms on many machines, before it looks who should.
_PAUSE_S = 1e-6


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

    They are daemons: a disk that never answers must not keep a process from ending.

    Args:
        name: prefix of the threads' names.
        num_threads: how many; they start with the first task.
        nice: how far they step back for others, see `step_back`; they also end their turn after each task then.

    Attributes:
        num_threads: as given.
    """

    def __init__(self, name: str, num_threads: int, *, nice: int = 0) -> None:
        self._tasks: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self.num_threads = num_threads
        self._nice = nice
        self._name = name
        self._threads: list[threading.Thread] = []

    def submit(self, task: Callable[[], None]) -> None:
        """Run ``task`` soon; after `close`, drop it."""
        with self._changed:
            if self._is_closed:
                return
            if not self._threads:
                self._start()
            self._tasks.append(task)
            self._changed.notify()

    def close(self, timeout_s: float) -> bool:
        """Drop what has not begun and wait for the rest; whether all of it ended in time. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._tasks.clear()
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _start(self) -> None:
        for index in range(self.num_threads):
            thread = threading.Thread(target=self._run, name=f"{self._name}-{index}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run(self) -> None:
        step_back(self._nice)
        while (task := self._take()) is not None:
            try:
                task()
            except Exception:
                logger.exception("a task of %s failed", threading.current_thread().name)
            del task  # a waiting thread keeps nothing alive
            if self._nice:
                time.sleep(_PAUSE_S)

    def _take(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._tasks and not self._is_closed:
                self._changed.wait()
            return self._tasks.popleft() if self._tasks else None
