"""Who is let in, and when: limits of each key, a bounded number at once, and a bounded queue by priority."""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from pdserve.errors import OverloadedError, RequestTimeoutError
from pdserve.router.config import AdmissionSettings
from pdserve.router.metrics import RouterMetrics
from pdserve.router.rate_limits import ANONYMOUS, KeyLimits


@dataclass(slots=True)
class Visitor:
    """Who wants to be let in.

    Attributes:
        key_id: names the API key, not its secret.
        num_prompt_tokens: of all prompts.
        num_output_tokens: made so far, counted by whoever serves it.
        priority: lower goes first.
    """

    key_id: str = ANONYMOUS
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    priority: int = 0


@dataclass(order=True, slots=True)
class _Waiting:
    """One that waits, in the order of the queue."""

    priority: int
    number: int
    since_s: float = field(compare=False)
    turn: asyncio.Future[None] = field(compare=False)


class Admission:
    """Lets requests in, by priority and then in the order they came. Lives on the event loop.

    Args:
        settings: the bounds.
        metrics: shows how many run and wait, and for how long.
    """

    def __init__(self, settings: AdmissionSettings, metrics: RouterMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._limits = KeyLimits(settings.key_max_concurrent, settings.key_tokens_per_minute)
        self._num_running = 0
        self._numbers = itertools.count()
        self._waiting: list[_Waiting] = []
        metrics.oldest_waiting.set_function(self._get_longest_wait_s)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is served and nothing waits."""
        return not self._num_running and not self._waiting

    @asynccontextmanager
    async def slot(self, visitor: Visitor, deadline_s: float) -> AsyncIterator[None]:
        """Hold a place while the request is served.

        Args:
            visitor: who asks.
            deadline_s: event loop time after which waiting ends.

        Raises:
            OverloadedError: as many as may wait are waiting, or the key uses all that it may.
            RequestTimeoutError: the deadline passed.
        """
        with self._account(visitor):
            await self._enter(visitor, deadline_s)
            try:
                yield
            finally:
                self._release()

    @contextmanager
    def _account(self, visitor: Visitor) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        self._limits.enter(visitor.key_id, visitor.num_prompt_tokens, loop.time())
        try:
            yield
        finally:
            self._limits.leave(visitor.key_id, visitor.num_output_tokens, loop.time())

    async def _enter(self, visitor: Visitor, deadline_s: float) -> None:
        loop = asyncio.get_running_loop()
        came_s = loop.time()
        if self._num_running >= self._settings.max_concurrent:
            await self._wait(visitor.priority, deadline_s)
        else:
            self._num_running += 1
        self._metrics.num_running.set(self._num_running)
        self._metrics.queue_time.observe(loop.time() - came_s)

    async def _wait(self, priority: int, deadline_s: float) -> None:
        """Wait until a request that ends passes its place on."""
        if len(self._waiting) >= self._settings.max_queue:
            raise OverloadedError(
                f"{self._num_running} requests are being served and {len(self._waiting)} wait; try again later",
                retry_after_s=max(self._get_longest_wait_s(), 1.0),
            )
        loop = asyncio.get_running_loop()
        waiting = _Waiting(priority, next(self._numbers), loop.time(), loop.create_future())
        bisect.insort(self._waiting, waiting)
        self._metrics.num_waiting.set(len(self._waiting))
        try:
            async with asyncio.timeout_at(deadline_s):
                await waiting.turn
        except BaseException as error:
            if waiting.turn.done() and not waiting.turn.cancelled():
                self._release()  # the place came just before the request was given up
            else:
                self._waiting.remove(waiting)
            if isinstance(error, TimeoutError):
                raise RequestTimeoutError("the request waited for longer than it may take") from None
            raise
        finally:
            self._metrics.num_waiting.set(len(self._waiting))

    def _release(self) -> None:
        """Pass the place to the first that waits, else free it."""
        while self._waiting:
            turn = self._waiting.pop(0).turn
            if not turn.done():
                turn.set_result(None)
                return
        self._num_running -= 1
        self._metrics.num_running.set(self._num_running)

    def _get_longest_wait_s(self) -> float:
        if not self._waiting:
            return 0.0
        return asyncio.get_running_loop().time() - min(waiting.since_s for waiting in self._waiting)
