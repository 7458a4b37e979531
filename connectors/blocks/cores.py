"""On which cores sleeping threads wake up.

Linux wakes a thread where it slept, or beside whoever wakes it, unless it sees another core idle. In a virtual machine
it takes an idle core for one that the host has given to others, and threads that could run side by side take turns on
one core for many milliseconds: as long as a transfer takes. So who wakes threads says where.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Callable, Sequence


def _find_getcpu() -> Callable[[], int] | None:
    if sys.platform != "linux":
        return None
    found: Callable[[], int] | None = getattr(ctypes.CDLL(None), "sched_getcpu", None)
    return found


_getcpu = _find_getcpu()


def get_allowed_cores() -> list[int]:
    """The cores that this process may use; none where the system does not place threads."""
    return sorted(os.sched_getaffinity(0)) if _getcpu is not None else []


def get_core() -> int:
    """The core that the calling thread runs on, or -1."""
    return _getcpu() if _getcpu is not None else -1


def place(thread_id: int, cores: Sequence[int]) -> None:
    """Let a thread, best a sleeping one, run on these cores only; no harm is done where that is not allowed."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(thread_id, cores)
