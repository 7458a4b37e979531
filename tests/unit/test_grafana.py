"""The Grafana dashboard asks only for metrics and labels that a router and an instance really show."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pdserve.engine.metrics import EngineStats
from pdserve.engine.server.counters import ServerCounters
from pdserve.router.metrics import RouterMetrics

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "pdserve.json"
SCRAPED = {"instance", "le"}
"""Labels that Prometheus adds, and that of histograms' buckets."""


def collect_labels(*registries: CollectorRegistry) -> dict[str, set[str]]:
    """Every sample's name and labels, also of metrics that have no sample before something happens."""
    found: dict[str, set[str]] = {}
    for registry in registries:
        for collector in list(registry._collector_to_names):
            for name in registry._collector_to_names[collector]:
                found[name] = set(getattr(collector, "_labelnames", ()))
    return found


@pytest.fixture(scope="module")
def known() -> dict[str, set[str]]:
    return collect_labels(RouterMetrics().registry, EngineStats().registry, ServerCounters().registry)


def queries() -> Iterator[tuple[str, str, str]]:
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"], target["legendFormat"]


def test_every_metric_and_label_exists(known: dict[str, set[str]]) -> None:
    assert len(list(queries())) > 30
    for title, expr, legend in queries():
        names = set(re.findall(r"pdserve_\w+", expr))
        assert names, title
        assert names <= set(known), (title, names - set(known))
        used = {label for group in re.findall(r"(?:by|on|group_left) \(([^)]*)\)", expr) for label in group.split(", ")}
        used |= set(re.findall(r"{{(\w+)}}", legend))
        offered = set().union(*(known[name] for name in names)) | SCRAPED
        assert used <= offered, (title, used - offered)
        assert expr.count("(") == expr.count(")"), title


def test_rates_are_of_counters_and_quantiles_of_histograms(known: dict[str, set[str]]) -> None:
    for title, expr, _ in queries():
        for name in re.findall(r"(?:rate|increase)\((\w+)\[", expr):
            assert name.endswith(("_total", "_bucket", "_sum", "_count")), title
        for name in re.findall(r"(pdserve_\w+)_bucket", expr):
            assert f"{name}_count" in known, title


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23


@pytest.mark.parametrize("build", [RouterMetrics, EngineStats, ServerCounters])
def test_names_follow_the_fields_habit(build: Any) -> None:
    """Source: Prometheus, "Metric and label naming"."""
    for metric in build().registry.collect():
        assert re.fullmatch(r"pdserve_[a-z0-9_]+", metric.name)
        assert metric.documentation
        assert not metric.name.endswith(("_ms", "_mb", "_total", "_count", "_sum", "_bucket")), metric.name
        if metric.type == "histogram" and not metric.name.endswith("_tokens"):
            assert metric.name.endswith("_seconds"), metric.name


def test_instances_page_is_one_exposition() -> None:
    """An instance's page joins two registries: no family may be in both."""
    stats, counters = EngineStats(), ServerCounters()
    names = [metric.name for registry in (stats.registry, counters.registry) for metric in registry.collect()]
    assert len(set(names)) == len(names)
