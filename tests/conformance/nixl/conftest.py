from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nixl")
sys.path.insert(0, str(Path(__file__).parent))

from nixl_peer import Peer

from pdserve.connectors.nixl import NixlConnector
from pdserve.connectors.testing import EngineHarness, build_context
from pdserve.connectors.testing.free_port import find_free_port
from pdserve.protocol import KVTransferParams, Role

MakeEngine = Callable[..., EngineHarness]


@pytest.fixture(params=["shared memory", "tcp"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """UCX's own choice on one machine, and the way it takes between machines."""
    if request.param == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
        monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    return str(request.param)


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Engines of one model, closed at the end; no thread may outlive them."""
    engines: list[EngineHarness] = []

    def make(role: str = "prefill", *, num_blocks: int = 64, **options: Any) -> EngineHarness:
        parts = {name: options.pop(name) for name in ("spec", "weights", "parallel") if name in options}
        types = options.pop("message_types", None)
        context = build_context(Role(role), options, engine_id=f"{role}-{len(engines)}", **parts)
        engines.append(EngineHarness(NixlConnector, context, num_blocks=num_blocks, message_types=types))
        engines[-1].step()  # the scheduler half hears where the worker half listens
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def start_peer() -> Iterator[Callable[..., Peer]]:
    """Producers in processes of their own; none is left behind."""
    peers: list[Peer] = []

    def start(**options: Any) -> Peer:
        peers.append(Peer(options))
        return peers[-1]

    yield start
    for peer in peers:
        peer.kill()


@pytest.fixture
def free_port() -> int:
    return find_free_port()


@pytest.fixture
def fetch() -> Callable[..., int]:
    """Load a prompt's KV by its parameters; the number of tokens that came. The request then ends."""

    def run(
        consumer: EngineHarness,
        request_id: str,
        token_ids: Sequence[int],
        params: KVTransferParams | None,
        *,
        num_local_tokens: int = 0,
        beside: Sequence[EngineHarness] = (),
    ) -> int:
        consumer.submit(request_id, token_ids, params=params)
        promised = consumer.lookup(request_id, num_local_tokens).num_tokens or 0
        consumer.admit(request_id, promised, num_local_tokens)
        if promised:
            step_until(lambda: request_id in consumer.received, consumer, *beside)
        consumer.finish(request_id)
        return consumer.received.get(request_id, 0)

    return run


def step_until(condition: Callable[[], bool], first: EngineHarness, *others: EngineHarness) -> None:
    """Idle steps of all these engines until ``condition`` holds."""

    def step_others() -> bool:
        for engine in others:
            engine.step()
        return condition()

    first.step_until(step_others)
