from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import httpx
import msgspec

from pdserve.engine.config import ConnectorSettings
from pdserve.engine.server.about import About, Server, build_about, find_server, find_store, look_at, try_to_reach
from pdserve.engine.server.http_port import build_app
from pdserve.engine.server.inbox import Inbox
from pdserve.engine.server.instance_server import Phase
from pdserve.protocol import Role


def describe(connector: str, **options: object) -> About:
    settings = ConnectorSettings(connector=connector, connector_options=dict(options))
    return build_about(instance_id="i", generation="g", role=Role.DECODE, connector=settings)


def test_secrets_are_left_out() -> None:
    about = describe("null", url="redis://user:hunter2@host:6379/0", password="hunter2", api_key="hunter2", lease_s=3)
    assert b"hunter2" not in msgspec.json.encode(about)
    assert about.connector_options == {"url": "redis://host:6379/0", "lease_s": 3}
    assert about.store is None


def test_store_is_the_directory_that_the_connector_uses(tmp_path: Path) -> None:
    about = describe("shared_storage", path=str(tmp_path))
    assert about.store is not None
    assert (about.store.path, about.store.is_usable) == (str(tmp_path), True)
    assert 0 < about.store.free_bytes <= about.store.total_bytes
    missing = look_at(tmp_path / "missing")
    assert (missing.is_usable, missing.total_bytes) == (False, 0)
    assert find_store(ConnectorSettings(connector="shared_storage")) is not None


def test_server_is_tried(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"redis://127.0.0.1:{listening.getsockname()[1]}/0"
        assert describe("redis", url=url).server == Server(url=url, is_reachable=True)
    assert describe("redis", url=url).server == Server(url=url, is_reachable=False)
    path = tmp_path / "socket"
    assert not try_to_reach(f"unix://{path}").is_reachable
    with socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(path))
        unix.listen()
        assert try_to_reach(f"unix://{path}").is_reachable
    assert find_server(ConnectorSettings(connector="redis")) == "redis://127.0.0.1:6379/0"


def test_about_is_served_while_the_model_loads() -> None:
    async def get() -> httpx.Response:
        app = build_app(Inbox(), lambda: Phase.STARTING, get_about=lambda: describe("null"))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://instance") as client:
            return await client.get("/about")

    answer = asyncio.run(get())
    assert answer.status_code == 200
    assert msgspec.json.decode(answer.content, type=About).instance_id == "i"
