"""Engines that do not suit each other: who says what, for each connector that comes with pdserve.

Stores address KV by keys that no other shape has: nothing is found, and nothing fails. Between two engines that talk to
each other, and in a store whose format has another version, the refusal is counted on both sides and names the
difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.connectors import load_connector
from pdserve.connectors.testing import Bench, ConformanceTarget, EngineHarness
from pdserve.connectors.testing.patience import Patience
from pdserve.connectors.testing.target import open_target
from pdserve.errors import ConfigError

CHILDREN = {
    "stores": [{"connector": "shared_storage", "name": name} for name in ("first", "second")],
    "nixl-and-files": [{"connector": "nixl"}, {"connector": "shared_storage"}],
}
STORES = ["memory", "shared_storage", "redis", "stores"]
TALKERS = ["nixl", "nixl-and-files"]
DIFFERENCES: list[tuple[dict[str, Any], str]] = [
    ({"block_size": 8}, "kv.block_size 8 here, 4 there"),
    ({"dtype": "float32"}, "kv.dtype float32 here, bfloat16 there"),
    ({"num_kv_heads": 1}, "kv.num_kv_heads 1 here, 2 there"),
    ({"block_size": 8, "num_kv_heads": 1}, "kv.num_kv_heads 1 here, 2 there, kv.block_size 8 here, 4 there"),
]


@pytest.fixture
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    target = open_target_of(request.param, tmp_path)
    bench = Bench(target, "R13", Patience())
    yield bench
    bench.close()
    target.close()


def open_target_of(name: str, directory: Path) -> ConformanceTarget:
    options = {"children": CHILDREN[name]} if name in CHILDREN else {}
    try:
        for child in CHILDREN.get(name, [{"connector": name}]):
            load_connector(child["connector"])
    except ConfigError as missing:
        pytest.skip(missing.message)
    return open_target("multi" if name in CHILDREN else name, directory, options=options)


def build_other_consumer(bench: Bench, change: dict[str, Any]) -> EngineHarness:
    return bench.build_consumer(spec=msgspec.structs.replace(bench.spec, **change))


@pytest.mark.parametrize("bench", STORES, indirect=True)
@pytest.mark.parametrize(("change", "difference"), DIFFERENCES)
def test_a_store_has_no_key_of_another_shape(bench: Bench, change: dict[str, Any], difference: str) -> None:
    producer, consumer = (
        bench.build_producer(),
        bench.build_consumer(spec=msgspec.structs.replace(bench.spec, **change)),
    )
    prompt = bench.make_prompt(13)
    assert bench.fetch(consumer, prompt, bench.hand_over(producer, prompt)) == 0
    assert (consumer.received, consumer.stats.failures, producer.stats.failures) == ({}, {}, {})


@pytest.mark.parametrize("bench", TALKERS, indirect=True)
@pytest.mark.parametrize(("change", "difference"), DIFFERENCES)
def test_a_refusal_names_the_difference(
    bench: Bench, change: dict[str, Any], difference: str, caplog: pytest.LogCaptureFixture
) -> None:
    producer, consumer = (
        bench.build_producer(),
        bench.build_consumer(spec=msgspec.structs.replace(bench.spec, **change)),
    )
    prompt = bench.make_prompt(13)
    assert bench.fetch(consumer, prompt, bench.hand_over(producer, prompt)) == 0
    bench.run_until(lambda: bool(producer.stats.failures), "the producer counts nothing", "R13")
    assert (consumer.stats.failures, producer.stats.failures) == ({"foreign": 1}, {"refused_foreign": 1})
    assert difference in caplog.text


@pytest.mark.parametrize("bench", ["nixl", *STORES[1:]], indirect=True)
def test_another_version_is_refused_by_name(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt = bench.make_prompt(13)
    with bench.target.other_version():
        params = bench.hand_over(producer, prompt)
        found = bench.fetch(consumer, prompt, params) if bench.is_direct else None
    assert (bench.fetch(consumer, prompt, params) if found is None else found) == 0
    assert consumer.stats.failures.keys() == {"foreign"}  # counted once by each reader
    assert "protocol version" in caplog.text or "is foreign" in caplog.text
