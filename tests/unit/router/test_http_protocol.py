"""A client that takes nothing of its answer, and one that is only slow, against a real server on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn
from fake_instances import run
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.router.http_protocol import build_http_protocol

_PIECE = b"x" * 65536
_REQUEST = "GET / HTTP/1.1\r\nhost: router\r\n\r\n"
_RECEIVE_BUFFER_BYTES = 65536


class LeavesARest:
    """An application whose answer ends as soon as not all of it could be handed to the kernel."""

    def __init__(self) -> None:
        self.server: uvicorn.Server | None = None
        self.num_left_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.server is not None
        (connection,) = self.server.server_state.connections
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not self.num_left_bytes:
            await send({"type": "http.response.body", "body": _PIECE[:8192], "more_body": True})
            await asyncio.sleep(0)  # transports may gather the writes of one turn
            self.num_left_bytes = connection.transport.get_write_buffer_size()  # type: ignore[union-attr]
        assert not connection.flow.write_paused  # type: ignore[union-attr]
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Endless:
    """An application that sends for as long as its client stays."""

    def __init__(self, num_pieces: int | None = None) -> None:
        self.num_pieces = num_pieces
        self.num_sent = 0
        self.left = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_all(send))
        while not sending.done() and (await receive())["type"] != "http.disconnect":
            pass
        sending.cancel()
        self.left.set()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while self.num_pieces is None or self.num_sent < self.num_pieces:
            await send({"type": "http.response.body", "body": _PIECE, "more_body": True})
            self.num_sent += 1
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextlib.asynccontextmanager
async def serve(app: ASGIApp, stall_timeout_s: float) -> AsyncIterator[tuple[int, uvicorn.Server]]:
    listening = socket.create_server(("127.0.0.1", 0))
    protocol = build_http_protocol(stall_timeout_s)
    server = uvicorn.Server(uvicorn.Config(app, http=protocol, ws="none", lifespan="off", log_config=None))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield listening.getsockname()[1], server
    finally:
        server.should_exit = server.force_exit = True
        await serving
        listening.close()


async def connect(port: int, request: str = _REQUEST) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    own = socket.socket()
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
    own.setblocking(False)
    await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=own, limit=_RECEIVE_BUFFER_BYTES)
    writer.write(request.encode())
    return reader, writer


def test_client_that_takes_nothing_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        app = Endless()
        async with serve(app, 0.2) as (port, _):
            _, writer = await connect(port)
            await app.left.wait()
            num_sent = app.num_sent
            writer.close()
        # What it was sent is bounded by the buffers of both ends, whatever the answer's length.
        assert 0 < num_sent * len(_PIECE) < 64 * 1024 * 1024

    run(main())
    assert "its connection is dropped" in caplog.text


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
def test_rest_of_a_whole_answer_that_nobody_takes_holds_no_connection(connection: str) -> None:
    async def main() -> None:
        app = LeavesARest()
        async with serve(app, 0.2) as (port, app.server):
            _, writer = await connect(port, f"GET / HTTP/1.1\r\nhost: router\r\nconnection: {connection}\r\n\r\n")
            while not app.num_left_bytes or app.server.server_state.connections:
                await asyncio.sleep(0.01)
            writer.close()

    run(main())


def test_client_that_reads_now_and_then_gets_everything() -> None:
    async def main() -> None:
        app = Endless(num_pieces=400)
        async with serve(app, 60.0) as (port, server):
            reader, writer = await connect(port)
            num_bytes = num_stalls = 0
            while num_bytes < 400 * len(_PIECE):
                while num_stalls < 5 and not any(has_stalled(server)):
                    await asyncio.sleep(0)
                num_stalls += 1
                while any(has_stalled(server)) or num_stalls >= 5:
                    num_bytes += (await reader.read(1 << 20)).count(b"x")
                    if num_bytes == 400 * len(_PIECE):
                        break
            # A timer that was left behind would drop the connection under its next answer.
            assert has_stalled(server) == [False]
            writer.close()

    run(main())


def test_a_request_that_offers_another_protocol_keeps_its_body() -> None:
    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while not body.endswith(b"!"):
            message = await receive()
            assert message["type"] == "http.request"
            body += message["body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})

    async def main() -> None:
        head = "POST / HTTP/1.1\r\nhost: router\r\nconnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        request = head + "http2-settings: AAEAAEAA\r\ncontent-length: 16\r\n\r\n"
        async with serve(echo, 60.0) as (port, _):
            reader, writer = await connect(port, request + "\r\nupgrade: body!")
            for parts in ([], [request, "\r\nupgrade:", " body!"]):
                for part in parts:
                    writer.write(part.encode())
                    await asyncio.sleep(0.01)
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
                assert await reader.readexactly(16) == b"\r\nupgrade: body!"
            writer.close()

    run(main())


def has_stalled(server: uvicorn.Server) -> list[bool]:
    """Of each connection, whether it is about to be dropped."""
    return [connection._stall is not None for connection in server.server_state.connections]  # type: ignore[union-attr]
