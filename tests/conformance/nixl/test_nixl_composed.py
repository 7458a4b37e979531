"""NIXL for the hand-off and a store for reuse, in one engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdserve.connectors.multi import MultiConnector
from pdserve.connectors.testing import EngineHarness, build_context
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.protocol import Role

S = TINY_SPEC.block_size
PROMPT = list(range(100, 100 + 4 * S + 1))
MakeEngine = Callable[[str], EngineHarness]


@pytest.fixture
def make_composed(tmp_path: Path) -> Iterator[MakeEngine]:
    engines: list[EngineHarness] = []
    children = [
        {"connector": "nixl", "options": {"lease_s": 600.0}},
        {"connector": "shared_storage", "options": {"path": str(tmp_path)}},
    ]

    def make(role: str) -> EngineHarness:
        context = build_context(Role(role), {"children": children}, engine_id=f"{role}-{len(engines)}")
        engines.append(EngineHarness(MultiConnector, context))
        engines[-1].step()
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def test_the_hand_off_goes_through_nixl_and_the_next_one_finds_the_store(make_composed: MakeEngine, fetch) -> None:
    prefill, decode, other = make_composed("prefill"), make_composed("decode"), make_composed("decode")
    params = prefill.prefill("p", PROMPT).kv_transfer_params
    assert params is not None
    assert set(params.payload) == {"nixl", "shared_storage"}
    assert fetch(decode, "d", PROMPT, params, beside=[prefill]) == len(PROMPT)
    prefill.step_until(lambda: "p" in prefill.sent)
    # Saved once by each child; the decode engine took the first one's.
    assert prefill.stats.num_blocks_saved == 2 * 5
    assert (prefill.num_used_blocks, decode.num_used_blocks) == (0, 0)
    assert fetch(other, "later", PROMPT, None) == len(PROMPT)
    assert (decode.stats.failures, other.stats.failures) == ({}, {})


def test_what_a_store_or_the_engine_itself_has_frees_the_producer(make_composed: MakeEngine) -> None:
    prefill, decode = make_composed("prefill"), make_composed("decode")
    params = prefill.prefill("p", PROMPT).kv_transfer_params
    prefill.step()
    decode.submit("d", PROMPT, params=params)
    decode.admit("d", 0, len(PROMPT))
    decode.step()
    prefill.step_until(lambda: "p" in prefill.sent)
    decode.finish("d")
    assert (prefill.num_used_blocks, decode.num_used_blocks) == (0, 0)
