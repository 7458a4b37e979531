"""Ends calls into a connector that never return.

The kit calls a connector on its own thread, as an engine does, and a call that hangs would hang the run. A watch on
another thread looks at what that thread is doing; when it has been in one call for too long, the watch sends a signal
whose handler raises `HangError` there: the call unwinds, and whatever the check had changed is put back. Native code
that never comes back to Python cannot be ended like this: then the watch no longer says that all is well, and
`checks_process` ends the process.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNAL = signal.SIGURG  # ignored by default: one that comes too late does no harm
_KIT = "pdserve.connectors.testing"
_LOOKS_A_LIMIT = 20


class HangError(BaseException):
    """A call into the connector lasted too long; not an `Exception`, so that the connector does not catch it."""


@contextmanager
def ending_hangs(limit_s: float, on_alive: Callable[[], None] | None = None) -> Iterator[None]:
    """Inside, a call from the kit to anything else that lasts longer than ``limit_s`` raises `HangError`.

    ``on_alive`` is called now and then, on another thread, unless a call has withstood that. On a thread that is not
    the main one nothing is watched: signals do not reach it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    watch = _Watch(limit_s, on_alive)
    before = signal.signal(_SIGNAL, watch.raise_hang)
    thread = threading.Thread(target=watch.run, name="hang-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        watch.stop()
        thread.join()
        signal.signal(_SIGNAL, before)


class _Watch:
    """Looks from its own thread; `raise_hang` runs on the main one."""

    def __init__(self, limit_s: float, on_alive: Callable[[], None] | None) -> None:
        self._limit_s = limit_s
        self._on_alive = on_alive
        self._is_over = threading.Event()
        self._place = ""

    def run(self) -> None:
        """Look now and then until the watch is over."""
        main_id = threading.main_thread().ident
        assert main_id is not None
        seen: tuple[FrameType, int] | None = None
        since, has_raised = time.monotonic(), False
        while not self._is_over.wait(self._limit_s / _LOOKS_A_LIMIT):
            caller, called = _find_call(sys._current_frames().get(main_id))
            # The caller is kept, so that another call is never taken for this one; the connector's own frames are not.
            now = (caller, id(called)) if caller is not None and called is not None else None
            if now is None or now != seen:
                seen, since, has_raised = now, time.monotonic(), False
            elif called is not None and time.monotonic() - since > self._limit_s:
                self._place = f"{called.f_code.co_qualname} ({called.f_code.co_filename}, line {called.f_lineno})"
                since, has_raised = time.monotonic(), True
                signal.pthread_kill(main_id, _SIGNAL)
            del caller, called
            if self._on_alive is not None and not has_raised:
                self._on_alive()

    def stop(self) -> None:
        """Nothing is raised any more."""
        self._is_over.set()

    def raise_hang(self, signal_number: int, frame: FrameType | None) -> None:
        """The signal's handler."""
        if not self._is_over.is_set() and self._place:
            raise HangError(f"did not return from {self._place} within {self._limit_s:g} s")


def _find_call(frame: FrameType | None) -> tuple[FrameType | None, FrameType | None]:
    """The kit's innermost frame, and the one that it called; None for that where the kit itself is at work."""
    called = None
    while frame is not None and not frame.f_globals.get("__name__", "").startswith(_KIT):
        called, frame = frame, frame.f_back
    return frame, called
