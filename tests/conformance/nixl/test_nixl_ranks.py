"""Engines of several ranks: each fetches its share from its counterpart, and all of them together end a transfer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

pytest.importorskip("nixl")

from pdserve.connectors.nixl import NixlConnector
from pdserve.connectors.testing import EngineHarness
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.protocol import KVTransferParams

S = TINY_SPEC.block_size
PROMPT = list(range(4 * S + 1))
TWO_BY_TWO = (2, 2)
TWO = (2, 1)


@pytest.fixture
def make_ranks(make_engine):
    """Engines whose halves live in processes of their own, as far as messages tell."""

    def make(role: str, parallel: tuple[int, int] = TWO, **options: Any) -> EngineHarness:
        types = NixlConnector.message_types({})
        return make_engine(role, parallel=parallel, message_types=types, **options)

    return make


def step_until(condition: Callable[[], bool], first: EngineHarness, other: EngineHarness) -> None:
    """Idle steps of both engines until ``condition`` holds."""

    def step_other() -> bool:
        other.step()
        return condition()

    first.step_until(step_other)


@pytest.mark.parametrize("parallel", [TWO, (1, 2), TWO_BY_TWO])
@pytest.mark.parametrize("chunk", [None, S + 1])
def test_every_rank_gets_its_share(make_ranks, fetch, parallel: tuple[int, int], chunk: int | None) -> None:
    """The harness compares every byte, and the ranks' bytes differ."""
    prefill, decode = make_ranks("prefill", parallel), make_ranks("decode", parallel)
    params = prefill.prefill("p", PROMPT, chunk=chunk or len(PROMPT)).kv_transfer_params
    assert params.num_bytes == 5 * TINY_SPEC.block_bytes
    assert fetch(decode, "d", PROMPT, params, beside=[prefill]) == len(PROMPT)
    prefill.step_until(lambda: "p" in prefill.sent)
    num_ranks = parallel[0] * parallel[1]
    assert (decode.stats.num_blocks_loaded, prefill.stats.num_blocks_saved) == (5 * num_ranks, 5 * num_ranks)
    assert (decode.stats.failures, prefill.stats.failures, prefill.sent) == ({}, {}, {"p": True})
    assert (decode.num_used_blocks, prefill.num_used_blocks) == (0, 0)


def test_a_wrong_byte_in_one_rank_counts_for_all(make_ranks, fetch) -> None:
    prefill, decode = make_ranks("prefill"), make_ranks("decode")
    prefill.submit("p", PROMPT)
    block_ids = prefill.admit("p", 0)
    prefill.step({"p": len(PROMPT)})
    params = prefill.finish("p", handoff=True).kv_transfer_params
    prefill.step()
    producers = [half._producer for half in prefill.ranks._halves]
    prefill.step_until(lambda: all(producer._checksums for producer in producers))
    prefill.memory.shares[1].read_block(block_ids[2])[0, 0, 0] ^= 1
    assert fetch(decode, "d", PROMPT, params) == 2 * S
    assert decode.stats.failures == {"corrupt": 1}


def test_blocks_are_free_when_the_last_rank_has_them(make_ranks) -> None:
    prefill, decode = make_ranks("prefill"), make_ranks("decode")
    params = prefill.prefill("p", PROMPT).kv_transfer_params
    decode.submit("d", PROMPT, params=params)
    decode.admit("d", decode.lookup("d").num_tokens or 0)
    decode.ranks.hold(1)
    step_until(lambda: decode.ranks.has_reported(0, "d"), decode, prefill)
    for _ in range(20):
        prefill.step()
    assert (prefill.sent, decode.received) == ({}, {})
    decode.ranks.let_go(1)
    step_until(lambda: "d" in decode.received, decode, prefill)
    prefill.step_until(lambda: "p" in prefill.sent)
    assert (decode.received, prefill.sent) == ({"d": len(PROMPT)}, {"p": True})
    decode.finish("d")


def test_a_lease_ends_in_every_rank(make_ranks, fetch) -> None:
    prefill, decode = make_ranks("prefill", lease_s=0.2), make_ranks("decode")
    params = prefill.prefill("p", PROMPT).kv_transfer_params
    prefill.step_until(lambda: "p" in prefill.sent)
    assert (prefill.sent, prefill.num_used_blocks, prefill.stats.failures) == ({"p": False}, 0, {"expired": 2})
    assert fetch(decode, "d", PROMPT, params) == 0
    assert decode.stats.failures == {"expired": 2}


@pytest.mark.parametrize(("theirs", "ours"), [(TWO, (1, 1)), ((1, 1), TWO), (TWO, (1, 2))])
def test_engines_of_other_sizes_are_refused_with_the_reason(
    make_ranks, fetch, caplog: pytest.LogCaptureFixture, theirs: tuple[int, int], ours: tuple[int, int]
) -> None:
    prefill, decode = make_ranks("prefill", theirs), make_ranks("decode", ours)
    params = prefill.prefill("p", PROMPT).kv_transfer_params
    assert fetch(decode, "d", PROMPT, params, beside=[prefill]) == 0
    assert set(decode.stats.failures) == {"foreign"}
    assert f"tensor_parallel_size {ours[0]} here, {theirs[0]} there" in caplog.text
    assert "a consumer of KV was refused" in caplog.text


def test_a_reference_to_another_ranks_share_is_refused(make_ranks, fetch) -> None:
    """Its checksums would be right, of bytes that are another rank's."""
    prefill, decode = make_ranks("prefill"), make_ranks("decode")
    params: KVTransferParams = prefill.prefill("p", PROMPT).kv_transfer_params
    (second,) = params.payload["more_ranks"]
    first = {"address": params.payload["address"], "generation": params.engine_id}
    forged = msgspec.structs.replace(
        params,
        engine_id=second["generation"],
        transfer_id=params.transfer_id.replace(params.engine_id, second["generation"]),
        payload={**params.payload, "address": second["address"], "more_ranks": [first]},
    )
    assert fetch(decode, "d", PROMPT, forged, beside=[prefill]) == 0
    assert decode.stats.failures == {"foreign": 2}
