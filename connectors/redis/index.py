"""Lookups: one round trip for all of a request's blocks, on a thread beside the scheduler's.

A lookup's life::

    first question ──> asked on a thread ──> answer ──> good for two seconds, then asked anew
         None             None             how many
                            └── deadline ──> 0

While the server fails, there is a pause in which every answer is 0 at once.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.connectors.base import ConnectorContext, KVRequest
from pdserve.connectors.blocks.block_format import BlockFormat
from pdserve.connectors.blocks.failures import Backoff, Failure, WarningLimiter
from pdserve.connectors.blocks.task_threads import TaskThreads
from pdserve.connectors.redis.channel import Command
from pdserve.connectors.redis.keys import KeyNames
from pdserve.connectors.redis.options import RedisOptions
from pdserve.connectors.redis.server import ExchangeError, RedisServer

logger = logging.getLogger(__name__)

_ANSWER_LIFE_S = 2.0
_NUM_THREADS = 2
_CLOSE_TIMEOUT_S = 2.0


@dataclass(slots=True)
class _Lookup:
    """One question; ``is_stored`` is set by the thread that has the answer."""

    deadline: float
    expires_at: float
    is_stored: list[bool] | None = None


class RedisIndex:
    """Lives on the scheduler's thread, which never waits for the server.

    Args:
        server: of this index alone; its timeout bounds a question.
        context: the engine.
        options: for the deadline.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        server: RedisServer,
        context: ConnectorContext,
        options: RedisOptions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._names = KeyNames(options.prefix, context.identity)
        self._value_bytes = BlockFormat(context.identity, context.spec).value_bytes
        self._timeout_s = options.lookup_timeout_s
        self._clock = clock
        self._backoff = Backoff(clock)
        self._warnings = WarningLimiter(logger, clock)
        self._threads = TaskThreads("kv-lookup", _NUM_THREADS)
        self._lock = threading.Lock()
        self._lookups: dict[str, _Lookup] = {}

    def count_stored_run(self, request: KVRequest, start: int) -> int | None:
        """How many blocks from ``start`` on are stored, without a gap; None until the server has answered."""
        now = self._clock()
        with self._lock:
            lookup = self._lookups.get(request.request_id)
            if lookup is None or now >= lookup.expires_at:
                lookup = self._begin(request, now)
            if lookup.is_stored is None:
                return None if now < lookup.deadline else 0
            run = lookup.is_stored[start:]
        return run.index(False) if False in run else len(run)

    def forget(self, request_id: str) -> None:
        """Drop the request's lookup; an answer under way is of no more use."""
        with self._lock:
            self._lookups.pop(request_id, None)

    def close(self) -> None:
        """Stop the threads and close the connections; idempotent."""
        if not self._threads.close(_CLOSE_TIMEOUT_S):
            logger.warning("a lookup did not end within %g s", _CLOSE_TIMEOUT_S)
        self._server.close()

    def _begin(self, request: KVRequest, now: float) -> _Lookup:
        deadline = now + self._timeout_s
        lookup = _Lookup(deadline, deadline + _ANSWER_LIFE_S)
        self._lookups[request.request_id] = lookup
        if not request.block_keys or self._backoff.get_reason() is not None:
            lookup.is_stored = []
        else:
            commands = [Command(b"STRLEN", self._names.of(key.digest)) for key in request.block_keys]
            self._threads.submit(functools.partial(self._ask, lookup, commands))
        return lookup

    def _ask(self, lookup: _Lookup, commands: list[Command]) -> None:
        is_stored: list[bool] = []
        try:
            if self._clock() < lookup.deadline:
                is_stored = self._exchange(commands)
        finally:
            with self._lock:
                lookup.is_stored = is_stored

    def _exchange(self, commands: list[Command]) -> list[bool]:
        try:
            with self._server.exchange(commands) as channels:
                replies = [channel.read_number() for channel in channels]
        except ExchangeError as error:
            self._note_failure(error.failure)
            return []
        failures = [reply for reply in replies if isinstance(reply, Failure) and reply.kind != "io"]
        if not failures:
            self._backoff.count_success()
        for failure in failures:
            self._note_failure(failure)
        return [reply == self._value_bytes for reply in replies]

    def _note_failure(self, failure: Failure) -> None:
        if failure.kind == "moved":
            self._server.note_move()
        self._backoff.count_failure(failure.kind)
        self._warnings.warn(
            failure.kind,
            f"{self._server.place} cannot be asked for KV: {failure.reason}; prompts are computed until it can",
        )
