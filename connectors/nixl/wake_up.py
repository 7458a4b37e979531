"""How other threads reach a loop that sleeps in a poller."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable


class WakeUp:
    """Functions to be run on the loop's thread, and a file descriptor that is readable while there are some."""

    def __init__(self) -> None:
        self._tasks: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._is_closed = False
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def run_soon(self, task: Callable[[], None]) -> None:
        """Run ``task`` on the loop's thread, in order of arrival; dropped after `close`. Any thread."""
        with self._lock:
            if not self._is_closed:
                self._tasks.append(task)
                os.eventfd_write(self.fd, 1)

    def run_all(self) -> None:
        """Run what has come. The loop's thread only."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)
        while self._tasks:
            self._tasks.popleft()()

    def close(self) -> None:
        """Take nothing more; idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._tasks.clear()
                os.close(self.fd)
