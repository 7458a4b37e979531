from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve import env
from pdserve.connectors.testing import EngineHarness, build_context
from pdserve.connectors.testing.targets.redis_process import RedisProcess
from pdserve.protocol import Role

env.prepare_for_lmcache()

MakeEngine = Callable[..., EngineHarness]
SMALL = {"max_cpu_bytes": 4 << 20, "cpu_cache": False}


@pytest.fixture(autouse=True, scope="session")
def quick_opening() -> Iterator[None]:
    from pdserve.connectors.testing.targets import lmcache

    with lmcache.quick_opening():
        yield


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def make_engine(store: Path) -> Iterator[MakeEngine]:
    """Engines that share a directory, or whatever option ``url`` says; closed at the end."""
    from pdserve.connectors.lmcache import LMCacheConnector

    engines: list[EngineHarness] = []

    def make(role: str = "prefill", *, num_blocks: int = 64, **options: Any) -> EngineHarness:
        context_parts = {name: options.pop(name) for name in ("spec", "weights") if name in options}
        options = {"url": f"fs://{store}", **SMALL, **options}
        context = build_context(Role(role), options, engine_id=f"engine-{len(engines)}", **context_parts)
        engines.append(EngineHarness(LMCacheConnector, context, num_blocks=num_blocks))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def server() -> Iterator[RedisProcess]:
    if not RedisProcess.is_installed():
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    process = RedisProcess()
    process.start()
    yield process
    process.close()
