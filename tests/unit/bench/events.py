"""Streams as servers send them, and a server that answers with them out of memory."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import httpx

DONE = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def token(text: str = " word", finish_reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": text, "finish_reason": finish_reason}], usage=None)


def chat_token(finish_reason: str | None = None, **delta: Any) -> bytes:
    return event(choices=[{"index": 0, "delta": delta, "finish_reason": finish_reason}])


def usage(prompt_tokens: int, completion_tokens: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens})


def answer(num_tokens: int) -> list[bytes]:
    """A whole answer, one piece an event."""
    return [*[token()] * (num_tokens - 1), token(finish_reason="length"), usage(7, num_tokens), DONE]


class Pieces(httpx.AsyncByteStream):
    """A body that arrives in pieces; an exception among them breaks the connection."""

    def __init__(self, pieces: Sequence[bytes | Exception]) -> None:
        self.pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            if isinstance(piece, Exception):
                raise piece
            yield piece


def streamed(*pieces: bytes | Exception) -> httpx.Response:
    return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Pieces(pieces))


class ScriptedServer(httpx.MockTransport):
    """Answers each request with what ``respond`` makes of its body; keeps the bodies."""

    def __init__(self, respond: Callable[[dict[str, Any]], httpx.Response]) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        super().__init__(self._answer)
        self._respond = respond

    def _answer(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        self.bodies.append(body)
        self.paths.append(request.url.path)
        return self._respond(body)
