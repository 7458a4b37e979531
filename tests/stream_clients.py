"""Clients that hold many streams at a time and cost next to nothing for each event.

Bytes are kept as they come, with the time of each arrival, and read once the answer is whole: what is measured is the
server. `run_clients` spreads the streams over several processes, so that no client holds another up.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import uvloop

_END = b"0\r\n\r\n"


@dataclass
class StreamAnswer:
    """One answer.

    Attributes:
        status: of HTTP; 0 when the connection broke before it came.
        text: of all its events.
        num_tokens: as its usage says.
        num_events: with text or a finish reason.
        num_bytes: of the whole response.
        finish_reason: of its last event with one.
        is_whole: whether it ended with ``[DONE]`` and the end of the response.
        error: the message of its error event, or the body of a refusal.
        sent_s: when the request went out, of `time.monotonic`, which all processes of a machine share.
        arrivals_s: when bytes arrived.
    """

    status: int = 0
    text: str = ""
    num_tokens: int = 0
    num_events: int = 0
    num_bytes: int = 0
    finish_reason: str | None = None
    is_whole: bool = False
    error: str = ""
    sent_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.sent_s

    @property
    def gaps_s(self) -> list[float]:
        return [after - before for before, after in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]


def build_request(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    """The bytes of a request that streams and ends with its usage."""
    content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: router\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


def read_answer(raw: bytes) -> StreamAnswer:
    """What the bytes of a response say; a part of one is read as far as it goes."""
    head, _, body = raw.partition(b"\r\n\r\n")
    answer = StreamAnswer(status=int(head.split(b" ", 2)[1]) if head else 0, num_bytes=len(raw))
    if b"chunked" not in head:
        answer.error = body.decode("utf-8", "replace")
        return answer
    content, is_ended = _join_chunks(body)
    events = [event.removeprefix(b"data: ") for event in content.split(b"\n\n") if event]
    answer.is_whole = is_ended and events[-1:] == [b"[DONE]"]
    for event in events:
        if event.startswith(b"{") and event.endswith(b"}"):
            _take_event(answer, json.loads(event))
    return answer


def _join_chunks(body: bytes) -> tuple[bytes, bool]:
    """The content of a chunked body, and whether its end is there."""
    parts: list[bytes] = []
    position = 0
    while (end := body.find(b"\r\n", position)) >= 0:
        size = int(body[position:end], 16)
        if size == 0:
            return b"".join(parts), True
        parts.append(body[end + 2 : end + 2 + size])
        position = end + 4 + size
    return b"".join(parts), False


def _take_event(answer: StreamAnswer, event: dict[str, Any]) -> None:
    if "error" in event:
        answer.error = event["error"]["message"]
    usage = event.get("usage")
    if usage:
        answer.num_tokens = usage["completion_tokens"]
    for choice in event.get("choices", ()):
        delta = choice.get("delta")
        answer.text += choice["text"] if delta is None else delta.get("content") or ""
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        answer.num_events += 1


class _Connection(asyncio.Protocol):
    """Sends the requests of one connection, one after the other, and keeps what comes back."""

    def __init__(self, requests: Sequence[bytes], ended: asyncio.Future[None]) -> None:
        self._waiting = list(reversed(requests))
        self._ended = ended
        self._transport: asyncio.Transport | None = None
        self.answers: list[tuple[float, list[bytes], list[float]]] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class, which inherits nothing
        self._send_next()

    def _send_next(self) -> None:
        assert self._transport is not None
        if not self._waiting:
            self._transport.close()
            return
        self.answers.append((time.monotonic(), [], []))
        self._transport.write(self._waiting.pop())

    def data_received(self, data: bytes) -> None:
        _, parts, arrivals_s = self.answers[-1]
        parts.append(data)
        arrivals_s.append(time.monotonic())
        if data.endswith(_END):
            self._send_next()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._ended.done():
            self._ended.set_result(None)


async def _run_streams(port: int, connections: Sequence[Sequence[bytes]]) -> list[_Connection]:
    loop = asyncio.get_running_loop()
    made: list[_Connection] = []
    endings: list[asyncio.Future[None]] = []
    for requests in connections:
        ended: asyncio.Future[None] = loop.create_future()
        build = partial(_Connection, requests, ended)
        _, protocol = await loop.create_connection(build, "127.0.0.1", port)
        made.append(protocol)
        endings.append(ended)
    await asyncio.gather(*endings)
    return made


def run_streams(port: int, connections: Sequence[Sequence[bytes]]) -> list[StreamAnswer]:
    """One connection for each sequence of requests, all at once; every answer, in the order of the requests."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        made = runner.run(_run_streams(port, connections))
    answers = []
    for connection in made:
        for sent_s, parts, arrivals_s in connection.answers:
            answer = read_answer(b"".join(parts))
            answer.sent_s, answer.arrivals_s = sent_s, arrivals_s
            answers.append(answer)
    return answers


def run_clients(port: int, connections: Sequence[Sequence[bytes]], num_processes: int) -> list[StreamAnswer]:
    """`run_streams` in several processes, each with its share of the connections."""
    shares = [connections[start::num_processes] for start in range(num_processes)]
    with ProcessPoolExecutor(num_processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        parts = pool.map(run_streams, [port] * num_processes, shares)
        return [answer for part in parts for answer in part]
