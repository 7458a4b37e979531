"""How many client requests are served at once, and how many may wait for that."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pdserve.errors import OverloadedError, RequestTimeoutError
from pdserve.router.config import AdmissionSettings
from pdserve.router.metrics import RouterMetrics


class Admission:
    """Lets requests in, first come first served. Lives on the event loop.

    Args:
        settings: the two bounds.
        metrics: shows how many run and wait.
    """

    def __init__(self, settings: AdmissionSettings, metrics: RouterMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._num_running = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def slot(self, deadline_s: float) -> AsyncIterator[None]:
        """Hold a place while the request is served.

        Args:
            deadline_s: event loop time after which waiting ends.

        Raises:
            OverloadedError: as many as may wait are waiting.
            RequestTimeoutError: the deadline passed.
        """
        if self._num_running >= self._settings.max_concurrent:
            await self._wait(deadline_s)
        else:
            self._num_running += 1
        self._metrics.num_running.set(self._num_running)
        try:
            yield
        finally:
            self._release()

    async def _wait(self, deadline_s: float) -> None:
        """Wait until a request that ends passes its place on."""
        if len(self._waiting) >= self._settings.max_queue:
            raise OverloadedError(
                f"{self._num_running} requests are being served and {len(self._waiting)} wait; try again later"
            )
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._metrics.num_waiting.set(len(self._waiting))
        try:
            async with asyncio.timeout_at(deadline_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._release()  # the place came just before the request was given up
            else:
                self._waiting.remove(turn)
            if isinstance(error, TimeoutError):
                raise RequestTimeoutError("the request waited for longer than it may take") from None
            raise
        finally:
            self._metrics.num_waiting.set(len(self._waiting))

    def _release(self) -> None:
        """Pass the place to the one that waits longest, else free it."""
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._num_running -= 1
        self._metrics.num_running.set(self._num_running)
