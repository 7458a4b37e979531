"""Lookups in a store that has to be asked: on a thread beside the scheduler's, which never waits.

A lookup's life::

    first question ──> asked on a thread ──> answer ──> good for two seconds, then asked anew
         None             None             how many
                            └── deadline ──> 0

While the store fails, there is a pause in which every answer is 0 at once.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.connectors.base import KVRequest
from pdserve.connectors.blocks.failures import Backoff, Failure, WarningLimiter
from pdserve.connectors.blocks.task_threads import TaskThreads
from pdserve.kv_layout import BlockKey

logger = logging.getLogger(__name__)

_ANSWER_LIFE_S = 2.0
_NUM_THREADS = 2
_CLOSE_TIMEOUT_S = 2.0


class UnansweredError(Exception):
    """The store did not answer; ``failure`` says why."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class BlockLookup(Protocol):
    """A store that can be asked. Thread-safe.

    Attributes:
        place: where the blocks lie, for people; no secrets.
    """

    place: str

    def count_stored_run(self, keys: Sequence[BlockKey]) -> int:
        """How many of ``keys`` are stored, up to the first that is not. Waits a bounded time.

        Raises:
            UnansweredError: the store cannot be asked.
        """
        ...

    def close(self) -> None:
        """Release everything; idempotent."""
        ...


@dataclass(slots=True)
class _Question:
    """One question about the blocks from ``start`` on; ``run`` is set by the thread that has the answer."""

    start: int
    deadline: float
    expires_at: float
    run: int | None = None

    def covers(self, start: int) -> bool:
        """Whether its answer tells what is stored from ``start`` on."""
        return self.start <= start and (self.run is None or start <= self.start + self.run)


class AskedIndex:
    """Lives on the scheduler's thread.

    Args:
        lookup: the store; closed with the index.
        timeout_s: longest wait of a request for its answer; then its prompt is computed.
        clock: monotonic seconds.
    """

    def __init__(self, lookup: BlockLookup, *, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lookup = lookup
        self._timeout_s = timeout_s
        self._clock = clock
        self._backoff = Backoff(clock)
        self._warnings = WarningLimiter(logger, clock)
        self._threads = TaskThreads("kv-lookup", _NUM_THREADS)
        self._lock = threading.Lock()
        self._questions: dict[str, _Question] = {}
        self._wake_engine: Callable[[], None] = lambda: None

    def set_wake_up(self, wake: Callable[[], None]) -> None:
        """Called on a thread of its own when a question has its answer."""
        self._wake_engine = wake

    def count_stored_run(self, request: KVRequest, start: int) -> int | None:
        """How many blocks from ``start`` on are stored, without a gap; None until the store has answered."""
        now = self._clock()
        with self._lock:
            question = self._questions.get(request.request_id)
            if question is None or now >= question.expires_at or not question.covers(start):
                question = self._begin(request, start, now)
            if question.run is not None:
                return question.start + question.run - start
            return None if now < question.deadline else 0

    def forget(self, request_id: str) -> None:
        """Drop the request's question; an answer under way is of no more use."""
        with self._lock:
            self._questions.pop(request_id, None)

    def close(self) -> None:
        """Stop the threads and close the store; idempotent."""
        if not self._threads.close(_CLOSE_TIMEOUT_S):
            logger.warning("a lookup did not end within %g s", _CLOSE_TIMEOUT_S)
        self._lookup.close()

    def _begin(self, request: KVRequest, start: int, now: float) -> _Question:
        deadline = now + self._timeout_s
        question = self._questions[request.request_id] = _Question(start, deadline, deadline + _ANSWER_LIFE_S)
        keys = request.block_keys[start:]
        if not keys or self._backoff.get_reason() is not None:
            question.run = 0
        else:
            self._threads.submit(functools.partial(self._ask, question, keys))
        return question

    def _ask(self, question: _Question, keys: Sequence[BlockKey]) -> None:
        run = 0
        try:
            if self._clock() < question.deadline:
                run = self._lookup.count_stored_run(keys)
                self._backoff.count_success()
        except UnansweredError as error:
            self._backoff.count_failure(error.failure.kind)
            self._warnings.warn(
                error.failure.kind,
                f"{self._lookup.place} cannot be asked for KV: {error}; prompts are computed until it can",
            )
        finally:
            with self._lock:
                question.run = run
            self._wake_engine()
