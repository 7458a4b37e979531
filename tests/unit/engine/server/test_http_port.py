from __future__ import annotations

import asyncio
import socket
import threading

import httpx
import pytest
import zmq

from pdserve.engine.server.http_port import HttpPort, build_app
from pdserve.engine.server.inbox import Drain, Inbox, Scrape
from pdserve.engine.server.instance_server import Phase
from pdserve.engine.server.listening import bind_http_socket, bind_router_socket
from pdserve.engine.server.settings import InstanceSettings
from pdserve.errors import ConfigError
from pdserve.protocol import Role


@pytest.mark.parametrize(
    ("phase", "health", "ready"),
    [(Phase.STARTING, 200, 503), (Phase.READY, 200, 200), (Phase.DRAINING, 200, 503), (Phase.ENDED, 503, 503)],
)
def test_health_and_ready_follow_the_phase(phase: Phase, health: int, ready: int) -> None:
    async def statuses() -> list[int]:
        transport = httpx.ASGITransport(build_app(Inbox(), lambda: phase))
        async with httpx.AsyncClient(transport=transport, base_url="http://instance") as client:
            return [(await client.get(path)).status_code for path in ("/health", "/ready")]

    assert asyncio.run(statuses()) == [health, ready]


def test_the_port_serves_metrics_and_drain_from_its_thread() -> None:
    inbox = Inbox()
    bound = bind_http_socket("127.0.0.1", 0)
    url = f"http://127.0.0.1:{bound.getsockname()[1]}"
    port = HttpPort(build_app(inbox, lambda: Phase.READY), bound)
    port.start()

    def answer() -> None:
        (scrape,) = inbox.take(10)
        assert isinstance(scrape, Scrape)
        scrape.answer.set_result(b"x 1\n")

    engine_thread = threading.Thread(target=answer)
    engine_thread.start()
    try:
        with httpx.Client(base_url=url, timeout=30) as client:
            metrics = client.get("/metrics")
            assert (metrics.status_code, metrics.text) == (200, "x 1\n")
            assert client.get("/drain").status_code == 405
            assert client.post("/drain").status_code == 202
            assert inbox.take(10) == [Drain("POST /drain")]
    finally:
        port.close()
        engine_thread.join()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, timeout=30)


def test_drain_from_elsewhere_is_refused() -> None:
    inbox = Inbox()

    async def status() -> int:
        transport = httpx.ASGITransport(build_app(inbox, lambda: Phase.READY), client=("10.0.0.9", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://instance") as client:
            return (await client.post("/drain")).status_code

    assert asyncio.run(status()) == 403
    assert len(inbox) == 0


def test_metrics_before_the_engine_stands_are_503() -> None:
    async def status() -> int:
        transport = httpx.ASGITransport(build_app(Inbox(), lambda: Phase.STARTING))
        async with httpx.AsyncClient(transport=transport, base_url="http://instance") as client:
            return (await client.get("/metrics")).status_code

    assert asyncio.run(status()) == 503


def test_a_taken_port_is_one_line_that_names_port_and_setting() -> None:
    context: zmq.Context = zmq.Context()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^port {port} on 127\.0\.0\.1 is in use; .* --http-port$"):
            bind_http_socket("127.0.0.1", port)
        with pytest.raises(ConfigError, match=rf"^port {port} on 127\.0\.0\.1 is in use; .* --port$"):
            bind_router_socket(context, "127.0.0.1", port)
    context.term()


def test_a_foreign_address_names_the_host_setting() -> None:
    context: zmq.Context = zmq.Context()
    with pytest.raises(ConfigError, match="--host"):
        bind_http_socket("203.0.113.1", 0)
    with pytest.raises(ConfigError, match="--host"):
        bind_router_socket(context, "203.0.113.1", 0)
    context.term()


def test_http_port_follows_the_port() -> None:
    assert InstanceSettings(port=8100).resolve_http_port() == 9100
    assert InstanceSettings(port=65000).resolve_http_port() == 0
    assert InstanceSettings(port=0).resolve_http_port() == 0
    assert InstanceSettings(port=8100, http_port=1234).resolve_http_port() == 1234
    assert InstanceSettings(host="h").resolve_instance_id(Role.DECODE, 7) == "decode-h-7"


@pytest.mark.parametrize(("shown", "expected"), [(False, 404), (True, 503)])
def test_blocks_are_shown_only_where_asked_for(shown: bool, expected: int) -> None:
    async def status() -> int:
        transport = httpx.ASGITransport(build_app(Inbox(), lambda: Phase.STARTING, debug_blocks=shown))
        async with httpx.AsyncClient(transport=transport, base_url="http://instance") as client:
            return (await client.get("/debug/blocks")).status_code

    assert asyncio.run(status()) == expected
