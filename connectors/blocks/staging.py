"""A bounded set of block-sized buffers between the forward thread and the writers."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

NO_WAIT = float("-inf")
"""The deadline of who takes a free buffer or none."""


class StagingPool:
    """Buffers for blocks that wait to be written.

    The forward thread acquires, writer threads release. One allocation; the system gives memory to a buffer when it
    is first used, and buffers are reused newest first, so an idle pool stays small and warm.

    Args:
        num_slots: buffers in all.
        slot_bytes: size of one.
        clock: monotonic seconds.
    """

    def __init__(self, num_slots: int, slot_bytes: int, clock: Callable[[], float]) -> None:
        self._buffers: npt.NDArray[np.uint8] = np.empty((num_slots, slot_bytes), dtype=np.uint8)
        self._num_touched = 0
        self._returned: list[int] = []
        self._changed = threading.Condition()
        self._clock = clock
        self._is_closed = False

    @property
    def num_free(self) -> int:
        """Buffers not in use."""
        with self._changed:
            return self._count_free()

    def acquire(self, deadline: float) -> int | None:
        """A free buffer's number; blocks until there is one, the pool is closed or ``deadline`` (then None)."""
        with self._changed:
            while not self._count_free() and not self._is_closed:
                remaining = deadline - self._clock()
                if remaining <= 0 or not self._changed.wait(remaining):
                    break
            if self._is_closed or not self._count_free():
                return None
            if self._returned:
                return self._returned.pop()
            self._num_touched += 1
            return self._num_touched - 1

    def get_buffer(self, slot: int) -> npt.NDArray[np.uint8]:
        """Buffer ``slot``."""
        buffer: npt.NDArray[np.uint8] = self._buffers[slot]
        return buffer

    def release(self, *slots: int) -> None:
        """Give buffers back."""
        with self._changed:
            self._returned += slots
            self._changed.notify()

    def close(self) -> None:
        """Wake who waits; nothing is handed out any more. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _count_free(self) -> int:
        return len(self._buffers) - self._num_touched + len(self._returned)
