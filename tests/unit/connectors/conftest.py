from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve.connectors.shared_storage import SharedStorageConnector
from pdserve.connectors.testing import EngineHarness, build_context
from pdserve.protocol import Role

MakeEngine = Callable[..., EngineHarness]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def make_engine(store: Path) -> Iterator[MakeEngine]:
    """Engines that share one directory, closed at the end; no thread may outlive them."""
    engines: list[EngineHarness] = []

    def make(role: str = "prefill", *, num_blocks: int = 64, **options: Any) -> EngineHarness:
        context_parts = {name: options.pop(name) for name in ("spec", "weights") if name in options}
        context = build_context(
            Role(role), {"path": str(store), **options}, engine_id=f"engine-{len(engines)}", **context_parts
        )
        engines.append(EngineHarness(SharedStorageConnector, context, num_blocks=num_blocks))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()
