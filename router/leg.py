"""A leg: one request at one instance, as the router sees it while it runs.

The instance's reader puts outputs in, the request's task takes them out. A leg ends with the output that has a
finish reason, with the loss of its instance, or with the deadline; `Leg.close` aborts one that has not ended.

Where a client, or this router itself, is slower than the instance, outputs wait here; they are then taken as one, so
that who is behind has less to do, not more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from pdserve.errors import PdserveError, RequestTimeoutError
from pdserve.protocol import FinishReason, RequestOutput

_JOINED_ENDS = (None, FinishReason.STOP, FinishReason.LENGTH)
"""Outputs that end otherwise stand alone: what they say is no part of the answer."""


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
        # Kept, because Python 3.11 makes a system call of each asyncio.get_running_loop().
        self._loop = asyncio.get_running_loop()
        self._items: deque[RequestOutput | PdserveError] = deque()
        self._arrival: asyncio.Future[None] | None = None
        """What the taker waits on while there is nothing."""
        self._ended = False

    def put(self, output: RequestOutput) -> None:
        """Called by the instance's reader; never blocks. What comes after the last output is dropped."""
        if self._ended:
            return
        self._ended = output.finish_reason is not None
        self._append(output)

    def lose(self, reason: str) -> None:
        """The instance is gone: the outputs already here are still taken, then `next_output` raises."""
        if not self._ended:
            self._ended = True
            self._append(InstanceLostError(reason))

    def expire(self) -> None:
        """The request's deadline passed."""
        if not self._ended:
            self.close()
            self._append(RequestTimeoutError("the request took longer than it may"))

    async def next_output(self) -> RequestOutput:
        """All outputs that wait, as one, or the next one; in the order the instance sent them.

        Raises:
            InstanceLostError: the instance is gone.
            RequestTimeoutError: the deadline passed.
        """
        if not self._items:
            self._arrival = self._loop.create_future()
            await self._arrival
        first = self._items.popleft()
        if isinstance(first, PdserveError):
            raise first
        return join_outputs([first, *self._take_joined()]) if self._items and _is_joined(first) else first

    def _take_joined(self) -> list[RequestOutput]:
        """The outputs in front that may be one with those before them."""
        taken: list[RequestOutput] = []
        while self._items:
            item = self._items[0]
            if isinstance(item, PdserveError) or not _is_joined(item):
                break
            taken.append(item)
            self._items.popleft()
        return taken

    def close(self) -> None:
        """Abort the leg at its instance unless it has ended; idempotent."""
        if not self._ended:
            self._ended = True
            self._abort(self.request_id)

    def _append(self, item: RequestOutput | PdserveError) -> None:
        self._items.append(item)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


def _is_joined(output: RequestOutput) -> bool:
    return output.finish_reason in _JOINED_ENDS


def join_outputs(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """What several outputs of one leg say together; only the last one may end it."""
    last = outputs[-1]
    logprobs = [entry for output in outputs if output.logprobs is not None for entry in output.logprobs]
    has_logprobs = any(output.logprobs is not None for output in outputs)
    return RequestOutput(
        request_id=last.request_id,
        new_token_ids=[token_id for output in outputs for token_id in output.new_token_ids],
        logprobs=logprobs if has_logprobs else None,
        prompt_logprobs=next((o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None),
        finish_reason=last.finish_reason,
        stop_token_id=last.stop_token_id,
        error=last.error,
        kv_transfer_params=last.kv_transfer_params,
        num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
        num_external_tokens=sum(output.num_external_tokens for output in outputs),
        events=[event for output in outputs for event in output.events],
    )
