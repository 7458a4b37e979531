from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pdserve.connectors.memory import MemoryConnector
from pdserve.connectors.testing import EngineHarness, build_context
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.errors import ConfigError
from pdserve.protocol import Role

S = TINY_SPEC.block_size
PROMPT = list(range(4 * S + 1))


@pytest.fixture
def store() -> dict[bytes, bytes]:
    return {}


@pytest.fixture
def make_engine(store: dict[bytes, bytes]) -> Iterator[Callable[[str], EngineHarness]]:
    engines: list[EngineHarness] = []

    def make(role: str = "prefill", weights: str = "weights-1") -> EngineHarness:
        context = build_context(Role(role), {"store": store}, engine_id=f"engine-{len(engines)}", weights=weights)
        engines.append(EngineHarness(MemoryConnector, context))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("chunk", [None, 1, 3, 4, 7])
def test_a_prompt_in_chunks_comes_back_whole(make_engine, store, chunk: int | None) -> None:
    prefill, decode = make_engine(), make_engine("decode")
    decision = prefill.prefill("p", PROMPT, chunk=chunk)
    assert not decision.expects_sent
    assert decision.kv_transfer_params is not None
    assert decision.kv_transfer_params.num_tokens == len(PROMPT)
    assert decode.load("d", PROMPT) == len(PROMPT)
    assert len(store) == prefill.stats.num_blocks_saved == decode.stats.num_blocks_loaded == 5
    num_bytes = 5 * TINY_SPEC.block_bytes
    assert prefill.stats.num_bytes_saved == decode.stats.num_bytes_loaded == num_bytes


def test_a_damaged_block_ends_the_load_and_is_removed(make_engine, store) -> None:
    make_engine().prefill("p", PROMPT)
    decode = make_engine("decode")
    decode.submit("d", PROMPT)
    decode.admit("d", decode.lookup("d").num_tokens or 0)
    digest = list(store)[2]
    store[digest] = store[digest][:-1] + b"?"
    decode.step()
    assert decode.received == {"d": 2 * S}
    assert decode.stats.failures == {"corrupt": 1}
    assert digest not in store


def test_strangers_and_decode_engines_leave_nothing(make_engine, store) -> None:
    make_engine("decode").prefill("x", PROMPT)
    assert store == {}
    make_engine().prefill("p", PROMPT)
    assert make_engine("decode", weights="weights-2").load("d", PROMPT) == 0
    assert make_engine("decode").load("d", PROMPT, salt="s") == 0


def test_a_report_that_nobody_promised_is_refused(make_engine) -> None:
    engine = make_engine()
    assert engine.worker.get_finished(["nobody"]).stats.failures == {"unknown": 1}
    assert engine.worker.get_finished([]).stats.failures == {}


@pytest.mark.parametrize("options", [{}, {"store": "name"}, {"store": {}, "more": 1}])
@pytest.mark.parametrize("build", ["build_scheduler", "build_worker"])
def test_the_store_is_an_option(build: str, options: dict) -> None:
    with pytest.raises(ConfigError, match="takes one option, store: a dictionary"):
        getattr(MemoryConnector, build)(build_context(Role.PREFILL, options))
