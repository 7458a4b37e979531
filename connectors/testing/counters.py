"""A connector's counters: what must hold of each report, and what a check has seen grow."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from pdserve.connectors.base import ConnectorOutput, ConnectorStats
from pdserve.connectors.testing.violations import RuleViolationError

RULE = "R23"


def require_plausible(output: ConnectorOutput) -> None:
    """Counters only grow, kinds of failures have names, and a composition's sum is that of its parts.

    Raises:
        RuleViolationError: a report says otherwise.
    """
    for name, stats in {**output.parts, "the connector": output.stats}.items():
        for field, value in _list_numbers(stats).items():
            if not (value >= 0 and math.isfinite(value)):
                raise RuleViolationError(RULE, f"{name} reports {field} = {value}")
        odd = {
            kind: count for kind, count in stats.failures.items() if not (isinstance(kind, str) and kind and count > 0)
        }
        if odd:
            raise RuleViolationError(RULE, f"{name} reports failures {odd}")
    if output.parts:
        _require_sum(output)


def get_growth(before: ConnectorStats, after: ConnectorStats) -> ConnectorStats:
    """What was counted between two moments."""
    numbers = {field: value - _list_numbers(before)[field] for field, value in _list_numbers(after).items()}
    grown = {kind: count - before.failures.get(kind, 0) for kind, count in after.failures.items()}
    return ConnectorStats(**numbers, failures={kind: count for kind, count in grown.items() if count})  # type: ignore[arg-type]


def copy_stats(stats: ConnectorStats) -> ConnectorStats:
    """The counters as they stand."""
    copy = ConnectorStats()
    copy.add(stats)
    return copy


def _require_sum(output: ConnectorOutput) -> None:
    total = ConnectorStats()
    for stats in output.parts.values():
        total.add(stats)
    said = _list_numbers(output.stats)
    for field, value in _list_numbers(total).items():
        if not math.isclose(value, said[field], abs_tol=1e-9):
            raise RuleViolationError(RULE, f"{field} is {said[field]}, and {value} of all parts together")
    if total.failures != output.stats.failures:
        raise RuleViolationError(
            RULE, f"failures are {output.stats.failures}, and {total.failures} of all parts together"
        )


def _list_numbers(stats: ConnectorStats) -> Mapping[str, float]:
    return {field.name: getattr(stats, field.name) for field in dataclasses.fields(stats) if field.name != "failures"}
