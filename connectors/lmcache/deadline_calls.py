"""Calls into somebody else's code that may never return, made by threads that can be left behind."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

from pdserve.connectors.blocks.failures import Failure
from pdserve.connectors.blocks.task_threads import TaskThreads

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")


class CallFailedError(Exception):
    """A call raised, or did not return in time; ``failure`` says which."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


@dataclass(slots=True)
class _Call(Generic[_Result]):
    """One call; ``result`` is set by its thread before ``ended``, unless it raised."""

    function: Callable[[], _Result]
    ended: threading.Event = field(default_factory=threading.Event)
    has_result: bool = False
    result: _Result | None = None


class DeadlineCalls:
    """A few threads that make calls, for callers who wait a bounded time. Any thread may call.

    A call that hangs keeps its thread. When all hang, further calls fail after their time without being queued, so
    nothing piles up.

    Args:
        name: prefix of the threads' names.
        num_threads: most calls at once.
        nice: how far they step back for others; so do the threads that are started within a call.
    """

    def __init__(self, name: str, num_threads: int, *, nice: int = 0) -> None:
        self._threads = TaskThreads(name, num_threads, nice=nice)
        self._idle = threading.Semaphore(num_threads)

    def run(self, function: Callable[[], _Result], timeout_s: float) -> _Result:
        """What ``function`` returns.

        Raises:
            CallFailedError: it raised (its traceback is logged), or ``timeout_s`` passed.
        """
        deadline = time.monotonic() + timeout_s
        if not self._idle.acquire(timeout=timeout_s):
            raise CallFailedError(Failure("timeout", "earlier calls of LMCache have not returned"))
        call = _Call(function)
        self._threads.submit(functools.partial(self._run, call))
        if not call.ended.wait(max(deadline - time.monotonic(), 0.0)):
            raise CallFailedError(Failure("timeout", f"LMCache did not answer within {timeout_s:g} s"))
        if not call.has_result:
            raise CallFailedError(Failure("io", "LMCache failed, see the log"))
        return cast("_Result", call.result)

    def close_after(self, function: Callable[[], object], timeout_s: float) -> None:
        """Make one last call, and leave behind what has not returned after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        try:
            self.run(function, timeout_s)
        except CallFailedError as error:
            logger.warning("LMCache was not closed: %s", error)
        if not self._threads.close(max(deadline - time.monotonic(), 0.0)):
            logger.warning("a call of LMCache did not return within %g s", timeout_s)

    def _run(self, call: _Call[_Result]) -> None:
        try:
            call.result = call.function()
            call.has_result = True
        finally:
            self._idle.release()
            call.ended.set()
