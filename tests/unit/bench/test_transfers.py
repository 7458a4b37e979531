"""Engines without models: blocks in turn, a hand-off of real bytes, and what does not get through is told."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from pdserve.bench.transfers.bench import TransferBench
from pdserve.bench.transfers.engine import BareEngine, Chunks, HandOffError
from pdserve.bench.transfers.pool import BlockRing
from pdserve.connectors.base import ConnectorContext
from pdserve.connectors.memory import MemoryConnector
from pdserve.kv_layout import KVCacheSpec, ModelIdentity
from pdserve.protocol import Role

SPEC = KVCacheSpec(num_layers=2, num_kv_heads=2, head_dim=8, block_size=4, dtype="bfloat16")
IDENTITY = ModelIdentity("w", "a", "bfloat16", "exact", SPEC)


def build(role: Role, options: dict[str, Any], ring: BlockRing) -> BareEngine:
    return BareEngine(MemoryConnector, ConnectorContext(role.value, role, IDENTITY, SPEC, options), ring)


@pytest.fixture
def rings() -> tuple[BlockRing, BlockRing]:
    producer, consumer = BlockRing(SPEC, 8), BlockRing(SPEC, 8)
    producer.fill()
    return producer, consumer


def test_blocks_are_side_by_side_and_taken_in_turn() -> None:
    ring = BlockRing(SPEC, 8)
    assert [ring.take(count) for count in (3, 4, 2, 6)] == [slice(0, 3), slice(3, 7), slice(0, 2), slice(2, 8)]


def test_filled_rings_of_one_size_are_equal_and_no_two_blocks_are() -> None:
    first, second = BlockRing(SPEC, 8), BlockRing(SPEC, 8)
    first.fill()
    second.fill()
    assert np.array_equal(first.rows, second.rows)
    assert len({row.tobytes() for row in first.rows}) == 8


def test_a_prompt_arrives_whole(rings: tuple[BlockRing, BlockRing]) -> None:
    options: dict[str, Any] = {"store": {}}
    producer, consumer = build(Role.PREFILL, options, rings[0]), build(Role.DECODE, options, rings[1])
    offered = producer.offer(range(10), Chunks(10))
    loaded = consumer.load(range(10), offered.params)
    assert np.array_equal(rings[1].rows[loaded.blocks], rings[0].rows[offered.blocks])
    assert not rings[0].kv_cache[2, :, :, :, 2:].any()  # slots behind the prompt's end
    assert offered.fetchable_s > offered.computed_s
    assert (producer.stats.num_blocks_saved, consumer.stats.num_blocks_loaded) == (3, 3)


def test_what_is_not_there_or_breaks_is_told(rings: tuple[BlockRing, BlockRing]) -> None:
    options: dict[str, Any] = {"store": {}}
    producer, consumer = build(Role.PREFILL, options, rings[0]), build(Role.DECODE, options, rings[1])
    offered = producer.offer(range(10), Chunks(10))
    with pytest.raises(HandOffError, match="promises 0 of 5 tokens"):
        consumer.load([9] * 5, None)
    key, value = list(options["store"].items())[-1]
    options["store"][key] = value[:-1] + bytes([value[-1] ^ 1])
    with pytest.raises(HandOffError, match=r"8 of 10 tokens arrived; failures \{'corrupt': 1\}"):
        consumer.load(range(10), offered.params)


def test_a_prompt_in_chunks_takes_its_time_and_is_saved_beside_it(rings: tuple[BlockRing, BlockRing]) -> None:
    options: dict[str, Any] = {"store": {}}
    producer, consumer = build(Role.PREFILL, options, rings[0]), build(Role.DECODE, options, rings[1])
    num_stored: list[int] = []
    compute = producer._forward.compute

    def note_and_compute(seconds: float) -> None:
        num_stored.append(len(options["store"]))
        compute(seconds)

    producer._forward.compute = note_and_compute  # type: ignore[method-assign]
    began_s = time.monotonic()
    offered = producer.offer(range(10), Chunks(4, tokens_per_s=500))
    assert num_stored == [0, 1, 2]
    assert offered.computed_s - began_s >= 10 / 500
    loaded = consumer.load(range(10), offered.params)
    assert np.array_equal(rings[1].rows[loaded.blocks], rings[0].rows[offered.blocks])


def test_other_bytes_than_were_sent_are_no_hand_off() -> None:
    bench = TransferBench(SPEC, 10, has_full_stores=True, seed=0)
    with bench.pair("memory") as (producer, consumer):
        assert bench.hand_over(producer, consumer, 10, Chunks(4)).num_bytes == 3 * SPEC.block_bytes
        assert isinstance(producer, BareEngine)
        producer._ring.rows[3, 0] ^= 1  # the next prompt's first byte
        with pytest.raises(HandOffError, match="other bytes"):
            bench.hand_over(producer, consumer, 10, Chunks(4))
