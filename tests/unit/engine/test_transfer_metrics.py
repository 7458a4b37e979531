"""What a connector counted, as metrics: every number once, under the connector's name."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from scripted import SchedulerHarness

from pdserve.connectors.base import ConnectorOutput, ConnectorStats, FinishDecision, MatchResult
from pdserve.engine.transfer_metrics import TransferMetrics
from pdserve.protocol import KVTransferParams


def read(registry: CollectorRegistry) -> dict[Any, float]:
    """Every sample that is not 0 by name and label values."""
    return {
        (sample.name.removeprefix("pdserve_kv_"), *sample.labels.values()): sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name.startswith("pdserve_kv_") and not sample.name.endswith("_created") and sample.value
    }


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> TransferMetrics:
    return TransferMetrics(registry, "mine")


def test_reports_add_up_under_the_connectors_name(registry: CollectorRegistry, metrics: TransferMetrics) -> None:
    stats = ConnectorStats(
        num_blocks_loaded=3, num_bytes_loaded=30, load_seconds=0.5, failures={"expired": 2, "corrupt": 1}
    )
    metrics.count(ConnectorOutput(stats=stats))
    metrics.count(ConnectorOutput(stats=stats))
    metrics.count_failure("late_report")
    assert read(registry) == {
        ("transfer_blocks_total", "mine", "load"): 6,
        ("transfer_bytes_total", "mine", "load"): 60,
        ("transfer_seconds_total", "mine", "load"): 1.0,
        ("transfer_failures_total", "mine", "expired"): 4,
        ("transfer_failures_total", "mine", "corrupt"): 2,
        ("transfer_failures_total", "mine", "late_report"): 1,
    }


def test_a_composition_counts_under_its_parts_names(registry: CollectorRegistry, metrics: TransferMetrics) -> None:
    parts = {
        "nixl": ConnectorStats(num_blocks_saved=2, num_bytes_saved=20),
        "files": ConnectorStats(num_blocks_saved=1, num_bytes_saved=10, failures={"no_space": 1}),
    }
    metrics.count(ConnectorOutput(stats=ConnectorStats(num_blocks_saved=3, num_bytes_saved=30), parts=parts))
    assert read(registry) == {
        ("transfer_blocks_total", "nixl", "save"): 2,
        ("transfer_bytes_total", "nixl", "save"): 20,
        ("transfer_blocks_total", "files", "save"): 1,
        ("transfer_bytes_total", "files", "save"): 10,
        ("transfer_failures_total", "files", "no_space"): 1,
    }


def test_time_without_blocks_counts(registry: CollectorRegistry, metrics: TransferMetrics) -> None:
    metrics.count(ConnectorOutput(stats=ConnectorStats(load_seconds=2.0)))
    assert read(registry) == {("transfer_seconds_total", "mine", "load"): 2.0}


@pytest.mark.parametrize(("found", "lookups"), [(9, {"hit": 3.0}), (8, {"hit": 2.0, "miss": 1.0}), (0, {"miss": 3.0})])
def test_an_admission_counts_its_lookup_once(found: int, lookups: dict[str, float]) -> None:
    h = SchedulerHarness()
    h.connector.matches["d"] = [MatchResult(None)] * 3 + [MatchResult(found, is_async=found > 0)]
    h.add("d", range(10, 19), output=[77])
    for _ in range(5):
        h.step()
    counted = {key[2]: value for key, value in read(h.stats.registry).items() if key[0] == "lookup_blocks_total"}
    assert counted == lookups


def test_a_hit_is_the_parts_that_has_the_blocks_and_a_miss_the_compositions() -> None:
    h = SchedulerHarness()
    h.connector.matches["d"] = [MatchResult(5, is_async=True, part="files")]
    h.add("d", range(10, 19), output=[77])
    h.step()
    counted = {key[1:]: value for key, value in read(h.stats.registry).items() if key[0] == "lookup_blocks_total"}
    assert counted == {("files", "hit"): 2.0, ("null", "miss"): 1.0}


def test_gauges_show_what_is_under_way() -> None:
    h = SchedulerHarness()
    params = KVTransferParams(connector="c", transfer_id="t")
    h.connector.decisions["held"] = FinishDecision(hold_blocks=True, kv_transfer_params=params)
    h.connector.decisions["written"] = FinishDecision(kv_transfer_params=params, announce_when_sent=True)
    h.connector.matches["d"] = [MatchResult(9, is_async=True)]
    for name in ("held", "written"):
        h.add(name, range(5), handoff=True)
    h.add("d", range(10, 19), output=[77])
    h.step()
    h.scheduler.transfers.update_metrics()
    now = read(h.stats.registry)
    assert (now["transfers_running", "load"], now["transfers_running", "save"], now["leases",]) == (1, 2, 1)
    h.step(ConnectorOutput(finished_sending={"held", "written"}, finished_receiving={"d"}))
    h.scheduler.transfers.update_metrics()
    assert not {key for key in read(h.stats.registry) if key[0] in ("transfers_running", "leases")}
