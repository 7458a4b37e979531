"""Sends one generated answer, streamed or whole, for as long as its client stays.

The answer is made inside the response: an error before the first token gets its own status, one after it an
event in the stream, and a client that leaves, at any moment and in either mode, cancels everything at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pdserve.errors import EngineError, PdserveError, RequestError, UnavailableError
from pdserve.router.admission import Visitor
from pdserve.router.api.answer_types import ErrorBody, Usage
from pdserve.router.api.answers import Answer, build_usage
from pdserve.router.api.errors import describe_error, error_response, json_response
from pdserve.router.api.prepare import PreparedRequest
from pdserve.router.api.service import RouterService
from pdserve.router.api.structured import name_field
from pdserve.router.choice import Choice, ChoiceDelta, run_choices
from pdserve.router.record import CLIENT_DISCONNECTED, RequestRecord

logger = logging.getLogger(__name__)

_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
_DONE = b"data: [DONE]\n\n"


class ClientLeftError(Exception):
    """The client closed its connection before the answer was whole."""


class GenerationResponse(Response):
    """The answer to one request.

    Args:
        service: the router's parts.
        request: what was asked for.
        choices: the choices, not yet running.
        answer: gives them their shape.
        record: hears how it ends.
        deadline_s: event loop time at which waiting to be let in ends.
        key_id: names the client's API key.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        service: RouterService,
        request: PreparedRequest,
        choices: Sequence[Choice],
        answer: Answer,
        record: RequestRecord,
        *,
        deadline_s: float,
        key_id: str,
    ) -> None:
        super().__init__(headers=_STREAM_HEADERS)
        # An empty response's length, which a stream does not have.
        del self.headers["content-length"]
        self._service = service
        self._request = request
        self._choices = choices
        self._answer = answer
        self._record = record
        self._deadline_s = deadline_s
        self._visitor = Visitor(key_id, request.num_prompt_tokens, priority=request.priority)
        self._has_begun = False
        self._outcome = "unknown"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Make and send the answer; called by the ASGI server."""
        try:
            async with cancel_when_client_leaves(receive):
                await self._serve(scope, receive, send)
        except ClientLeftError:
            self._outcome = CLIENT_DISCONNECTED
        except asyncio.CancelledError:
            # A server that stops cancels what still runs; the client hears of it in words.
            await self._send_error(UnavailableError("the router is stopping"), scope, receive, send)
        finally:
            self._record.end(self._outcome)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with (
                self._service.admission.slot(self._visitor, self._deadline_s),
                aclosing(run_choices(self._choices)) as deltas,
            ):
                if self._request.stream:
                    await self._send_stream(deltas, send)
                else:
                    await self._send_whole(deltas, scope, receive, send)
        except PdserveError as error:
            if isinstance(error, RequestError) and self._request.grammar_field is not None:
                name_field(error, self._request.grammar_field)
            await self._send_error(error, scope, receive, send)
        except Exception:
            logger.exception("the router failed on request %s", self._record.timeline.response_id)
            await self._send_error(EngineError("the router failed on this request"), scope, receive, send)

    async def _send_whole(
        self, deltas: AsyncGenerator[ChoiceDelta, None], scope: Scope, receive: Receive, send: Send
    ) -> None:
        async for delta in deltas:
            self._answer.take(delta)
            self._note(delta)
        self._record.metrics.cached_tokens.inc(self._usage()["prompt_tokens_details"]["cached_tokens"])
        await json_response(self._answer.whole(self._usage()))(scope, receive, send)

    async def _send_stream(self, deltas: AsyncGenerator[ChoiceDelta, None], send: Send) -> None:
        async for delta in deltas:
            if not self._has_begun:
                self._has_begun = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            for chunk in self._answer.chunks(delta):
                await self._send_event(chunk, send)
            self._note(delta)
        if self._request.include_usage:
            await self._send_event(self._answer.usage_chunk(self._usage()), send)
        self._record.metrics.cached_tokens.inc(self._usage()["prompt_tokens_details"]["cached_tokens"])
        await send({"type": "http.response.body", "body": _DONE, "more_body": False})

    async def _send_error(self, error: PdserveError, scope: Scope, receive: Receive, send: Send) -> None:
        self._outcome = error.code
        if self._has_begun:
            await self._send_event(describe_error(error), send)
            await send({"type": "http.response.body", "body": _DONE, "more_body": False})
        else:
            await error_response(error)(scope, receive, send)

    @staticmethod
    async def _send_event(value: dict[str, Any] | ErrorBody, send: Send) -> None:
        """One server-sent event, in a write of its own."""
        body = b"data: " + msgspec.json.encode(value) + b"\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": True})

    def _note(self, delta: ChoiceDelta) -> None:
        self._visitor.num_output_tokens += len(delta.token_ids)
        if delta.finish_reason is not None and delta.index == 0:
            self._outcome = delta.finish_reason

    def _usage(self) -> Usage:
        return build_usage(self._request, self._choices)


@asynccontextmanager
async def cancel_when_client_leaves(receive: Receive) -> AsyncIterator[None]:
    """Cancel the body when the client closes its connection.

    Raises:
        ClientLeftError: it did.
    """
    task = asyncio.current_task()
    assert task is not None
    is_over = has_left = False

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        # The server reports a disconnect also once the answer is whole.
        if not is_over:
            has_left = True
            task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if has_left and task.uncancel() == 0:
            raise ClientLeftError from None
        raise
    finally:
        is_over = True
        watcher.cancel()
