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

    def make(role: str = "prefill", weights: str = "weights-1", parallel: tuple[int, int] = (1, 1)) -> EngineHarness:
        engine_id = f"engine-{len(engines)}"
        context = build_context(Role(role), {"store": store}, engine_id=engine_id, weights=weights, parallel=parallel)
        types = MemoryConnector.message_types(context.options)
        engines.append(EngineHarness(MemoryConnector, context, message_types=types))
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


@pytest.mark.parametrize("parallel", [(2, 1), (1, 2), (2, 2)])
def test_each_rank_has_shares_of_its_own(make_engine, store, parallel: tuple[int, int]) -> None:
    prefill, decode = make_engine(parallel=parallel), make_engine("decode", parallel=parallel)
    prefill.prefill("p", PROMPT, chunk=7)
    assert decode.load("d", PROMPT) == len(PROMPT)
    ranks = prefill.context.rank.size
    assert len(store) == prefill.stats.num_blocks_saved == decode.stats.num_blocks_loaded == 5 * ranks
    assert decode.stats.num_bytes_loaded == 5 * TINY_SPEC.block_bytes
    assert make_engine("decode").load("d", PROMPT) == 0


def test_a_block_of_which_one_share_is_gone_is_not_promised(make_engine, store) -> None:
    prefill = make_engine(parallel=(2, 1))
    prefill.prefill("p", PROMPT)
    last = prefill.context.rank.all_ranks[-1]
    names = [name for name in store if name.endswith(last.label.encode())]
    assert len(names) == 5
    del store[names[2]]
    assert make_engine("decode", parallel=(2, 1)).load("d", PROMPT) == 2 * S


def test_another_ranks_share_is_foreign(make_engine, store) -> None:
    prefill = make_engine(parallel=(2, 1))
    prefill.prefill("p", PROMPT)
    first, second = (rank.label.encode() for rank in prefill.context.rank.all_ranks)
    swapped = next(name for name in store if name.endswith(second))
    store[swapped] = store[swapped.removesuffix(second) + first]
    decode = make_engine("decode", parallel=(2, 1))
    assert decode.load("d", PROMPT) == 0
    assert decode.stats.failures == {"foreign": 1}


def test_a_report_that_nobody_promised_is_refused(make_engine) -> None:
    engine = make_engine()
    assert engine.worker.get_finished(["nobody"]).stats.failures == {"unknown": 1}
    assert engine.worker.get_finished([]).stats.failures == {}


@pytest.mark.parametrize("options", [{}, {"store": "name"}, {"store": {}, "more": 1}])
@pytest.mark.parametrize("build", ["build_scheduler", "build_worker"])
def test_the_store_is_an_option(build: str, options: dict) -> None:
    with pytest.raises(ConfigError, match="takes one option, store: a dictionary"):
        getattr(MemoryConnector, build)(build_context(Role.PREFILL, options))
