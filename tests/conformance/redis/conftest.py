from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pdserve.connectors.testing import EngineHarness, build_context
from pdserve.connectors.testing.targets.redis_process import RedisProcess
from pdserve.protocol import Role

pytest.importorskip("redis")

from pdserve.connectors.redis import RedisConnector

MakeEngine = Callable[..., EngineHarness]


@pytest.fixture(autouse=True, scope="session")
def redis_is_installed() -> None:
    if not RedisProcess.is_installed():
        pytest.skip("redis-server is not installed: apt-get install redis-server")


@pytest.fixture(autouse=True)
def no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDSERVE_REDIS_PASSWORD", raising=False)


@pytest.fixture(scope="module")
def module_server() -> Iterator[RedisProcess]:
    process = RedisProcess()
    process.start()
    yield process
    process.close()


@pytest.fixture
def server(module_server: RedisProcess) -> RedisProcess:
    """Running and empty, whatever the test before did to it."""
    import redis

    client = redis.Redis(unix_socket_path=str(module_server.unix_path))
    try:
        client.ping()
    except redis.ConnectionError:
        module_server.kill()
        module_server.start()
    client.flushall()
    client.config_set("maxmemory", 0)
    client.close()
    return module_server


@pytest.fixture
def run_server() -> Iterator[Callable[..., RedisProcess]]:
    """Servers with settings of their own."""
    processes: list[RedisProcess] = []

    def run(*arguments: str, port: int = 0) -> RedisProcess:
        processes.append(RedisProcess(*arguments, port=port))
        processes[-1].start()
        return processes[-1]

    yield run
    for process in processes:
        process.close()


@pytest.fixture
def make_engine(request: pytest.FixtureRequest) -> Iterator[MakeEngine]:
    """Engines that share one server, closed at the end; no thread may outlive them."""
    engines: list[EngineHarness] = []

    def make(role: str = "prefill", *, num_blocks: int = 64, **options: Any) -> EngineHarness:
        context_parts = {name: options.pop(name) for name in ("spec", "weights") if name in options}
        if "url" not in options:
            options["url"] = request.getfixturevalue("server").url
        # Machines that run tests are busy; what waits for a deadline sets one of its own.
        options = {"timeout_s": 10.0, "lookup_timeout_s": 10.0, **options}
        context = build_context(Role(role), options, engine_id=f"engine-{len(engines)}", **context_parts)
        engines.append(EngineHarness(RedisConnector, context, num_blocks=num_blocks))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
