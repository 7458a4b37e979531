"""A leg: one request at one instance, as the router sees it while it runs.

The instance's reader puts outputs in, the request's task takes them out. A leg ends with the output that has a
finish reason, with the loss of its instance, or with the deadline; `Leg.close` aborts one that has not ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdserve.errors import PdserveError, RequestTimeoutError
from pdserve.protocol import RequestOutput


class InstanceLostError(PdserveError):
    """The instance that ran a leg is gone; the request goes on elsewhere."""

    code = "instance_lost"
    http_status = 503
    retryable = True


class Leg:
    """One leg. Lives on the event loop.

    Args:
        request_id: the leg's id at the instance.
        abort: tells the instance to stop it; called at most once, and only while the leg runs.
    """

    def __init__(self, request_id: str, abort: Callable[[str], None]) -> None:
        self.request_id = request_id
        self._abort = abort
        self._items: asyncio.Queue[RequestOutput | PdserveError] = asyncio.Queue()
        self._ended = False

    def put(self, output: RequestOutput) -> None:
        """Called by the instance's reader; never blocks. What comes after the last output is dropped."""
        if self._ended:
            return
        self._ended = output.finish_reason is not None
        self._items.put_nowait(output)

    def lose(self, reason: str) -> None:
        """The instance is gone: the outputs already here are still taken, then `next_output` raises."""
        if not self._ended:
            self._ended = True
            self._items.put_nowait(InstanceLostError(reason))

    def expire(self) -> None:
        """The request's deadline passed."""
        if not self._ended:
            self.close()
            self._items.put_nowait(RequestTimeoutError("the request took longer than it may"))

    async def next_output(self) -> RequestOutput:
        """The next output, in the order the instance sent them.

        Raises:
            InstanceLostError: the instance is gone.
            RequestTimeoutError: the deadline passed.
        """
        item = await self._items.get()
        if isinstance(item, PdserveError):
            raise item
        return item

    def close(self) -> None:
        """Abort the leg at its instance unless it has ended; idempotent."""
        if not self._ended:
            self._ended = True
            self._abort(self.request_id)
