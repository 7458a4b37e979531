"""What a comparison measured, and the tables that show it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.bench.measure.model_floors import MachineRates, ModelCosts
from pdserve.bench.measure.ratios import compare_rounds
from pdserve.bench.measure.summary import Summary
from pdserve.bench.scenarios import Metric, Scenario
from pdserve.bench.show.report import render_lost
from pdserve.bench.show.tables import MISSING, format_number, format_share, format_table


@dataclass(slots=True)
class Results:
    """What was measured so far.

    Attributes:
        summaries: of each round, by scenario and server.
        start_times_s: of each round, by server; None where it ran already.
        costs: what a token of the model costs.
        rates: what the cores give; None where that was not measured.
    """

    summaries: dict[str, dict[str, list[Summary]]]
    start_times_s: dict[str, list[float | None]]
    costs: ModelCosts
    rates: MachineRates | None

    @property
    def num_lost(self) -> int:
        """Requests lost by anybody."""
        return sum(s.num_lost for by_name in self.summaries.values() for rounds in by_name.values() for s in rounds)


def render(results: Results, scenarios: Sequence[Scenario], names: Sequence[str], cores: Sequence[int]) -> str:
    """A table for each scenario: everybody's median, and how many times better than each the first one is."""
    heading = (
        f"\non cores {', '.join(map(str, cores))}, medians over the rounds; x: how many times better {names[0]} is than"
        f" the one to the left; possible: what these cores allow, and the share of it that {names[0]} reaches"
    )
    parts = [heading, _render_start_times(results, names)]
    for scenario in scenarios:
        by_name = results.summaries[scenario.name]
        parts.append(f"{scenario.name}: {scenario.purpose}\n{_render_scenario(results, scenario, names)}")
        parts += [_render_losses(name, by_name[name]) for name in names if any(s.num_lost for s in by_name[name])]
    return "\n\n".join(parts)


def _render_scenario(results: Results, scenario: Scenario, names: Sequence[str]) -> str:
    own, *others = names
    by_name = results.summaries[scenario.name]
    rows = [["", own, *(cell for name in others for cell in (name, "x (min..max)")), "possible", "share"]]
    for metric in scenario.metrics:
        pairs = [_render_metric(metric, by_name, own, name) for name in others]
        value = _median(read_rounds(metric, by_name[own]))
        possible = find_possible(metric, results, scenario)
        share = None
        if value and possible:
            share = value / possible if metric.is_more_better else possible / value
        cells = [cell for pair in pairs for cell in pair]
        rows.append([metric.name, format_number(value), *cells, format_number(possible), format_share(share)])
    return format_table(rows)


def find_possible(metric: Metric, results: Results, scenario: Scenario) -> float | None:
    """The best value that the cores allow; None where nobody can say, or they were not measured."""
    if metric.find_possible is None or results.rates is None:
        return None
    return metric.find_possible(results.costs, results.rates, scenario)


def _render_metric(metric: Metric, by_name: Mapping[str, Sequence[Summary]], own: str, name: str) -> tuple[str, str]:
    values = read_rounds(metric, by_name[name])
    ratio = compare_rounds(read_rounds(metric, by_name[own]), values, is_more_better=metric.is_more_better)
    spread = MISSING if ratio is None else f"{ratio.median:.2f} ({ratio.minimum:.2f}..{ratio.maximum:.2f})"
    return format_number(_median(values)), spread


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def read_rounds(metric: Metric, rounds: Sequence[Summary]) -> list[float | None]:
    """A figure of each round; None where requests were lost: what is left would flatter whoever lost them."""
    return [None if summary.num_lost else metric.read(summary) for summary in rounds]


def _render_start_times(results: Results, names: Sequence[str]) -> str:
    rows = [["", "start to ready, s"]]
    for name in names:
        middle_s = _median(results.start_times_s[name])
        rows.append([name, "ran already" if middle_s is None else format_number(middle_s)])
    return format_table(rows)


def _render_losses(name: str, rounds: Sequence[Summary]) -> str:
    lines = [f"{name} lost requests; the rounds it lost them in are not compared:"]
    for summary in rounds:
        if summary.num_lost:
            lines.append(render_lost(summary.lost, summary.num_lost, summary.num_requests))
    return "\n".join(lines)
