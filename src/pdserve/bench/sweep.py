"""``pdserve bench sweep``: which rate, split and threshold serve the most requests within an objective."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.bench.client.discovery import find_model
from pdserve.bench.client.settings import TargetSettings, base_url
from pdserve.bench.measure.summary import Distribution, LostKind, Objective, Summary
from pdserve.bench.measurement import Measurer
from pdserve.bench.rate_search import RatePoint, find_best, measure_rates, search_rates
from pdserve.bench.servers.pdserve_server import Split, plan_pdserve
from pdserve.bench.servers.server import ServerPlan, running
from pdserve.bench.show.plots import check_plot, plot_sweep
from pdserve.bench.show.report import render_lost
from pdserve.bench.show.results import check_writable, describe_summary, write_results
from pdserve.bench.show.settings import ObjectiveSettings, OutputSettings, PlotSettings
from pdserve.bench.show.tables import MISSING, format_ms, format_number, format_share, format_table
from pdserve.bench.workload.settings import LoadSettings, WorkloadSettings
from pdserve.bench.workload.tokenizers import find_tokenizer
from pdserve.engine.config import EngineConfig
from pdserve.errors import ConfigError
from pdserve.settings import load_settings, section, setting

_MIN_REQUESTS = 16
_DEFAULT_TTFT_MS = 500.0
_DEFAULT_ITL_MS = 100.0


@dataclass(frozen=True)
class SweepSettings:
    """Which deployments and rates are tried."""

    url: str | None = setting(
        None, help="a service that runs already; default: pdserve up is started for each split", metavar="URL"
    )
    splits: list[str] = setting(["1:1"], help="prefill and decode instances to try", metavar="P:D")
    thresholds: list[str] = setting(
        ["0"], help="prompts with fewer uncached tokens are not handed off; several are tried", metavar="TOKENS"
    )
    rates: list[str] = setting(
        [], help="requests a second to try; default: search for the highest that is good enough", metavar="RATE"
    )
    start_rate: float = setting(1.0, help="where the search for the rate begins")
    refinements: int = setting(2, help="how often the search halves the gap that it found", minimum=0)
    point_s: float = setting(30.0, help="how long requests arrive at each rate; 16 requests at least", minimum=1)
    attainment: float = setting(
        0.9, help="share of requests that must meet the objective for a rate to be good enough", minimum=0, maximum=1
    )


@dataclass(frozen=True)
class SweepConfig:
    """All settings of ``pdserve bench sweep``."""

    sweep: SweepSettings = field(default_factory=SweepSettings)
    target: TargetSettings = section(TargetSettings, exclude=("url", "model"))
    workload: WorkloadSettings = section(WorkloadSettings, exclude=("num_requests",))
    load: LoadSettings = section(LoadSettings, exclude=("rate", "arrivals"))
    objective: ObjectiveSettings = section(
        lambda: ObjectiveSettings(slo_ttft_ms=_DEFAULT_TTFT_MS, slo_itl_ms=_DEFAULT_ITL_MS)
    )
    engine: EngineConfig = field(default_factory=EngineConfig)
    output: OutputSettings = field(default_factory=OutputSettings)
    plots: PlotSettings = field(default_factory=PlotSettings)


def run(argv: Sequence[str]) -> int:
    """Measure, print what is best, and say by the exit status whether every request was answered whole.

    Raises:
        ConfigError: a setting is wrong, or a service does not start.
    """
    config = load_settings(
        SweepConfig,
        prog="pdserve bench sweep",
        description="Find the rate, the split into prefill and decode instances and the hand-off threshold that serve"
        " the most requests within an objective.",
        examples=[
            "pdserve bench sweep --splits 0:2 1:1 --slo-ttft-ms 500 --slo-itl-ms 60",
            "pdserve bench sweep --splits 1:1 --thresholds 0 128 512 --prompt-tokens 32:0.5,1024:0.5 --rates 1 2 4",
            "pdserve bench sweep --url http://127.0.0.1:8000 --plot rates.png --output rates.json",
        ],
        argv=argv,
    )
    check_writable(config.output.output, "--output")
    check_plot(config.plots.plot)
    objective = config.objective.build()
    rates = _check(config, objective)
    curves: dict[str, list[RatePoint]] = {}
    for plan in plan_deployments(config):
        with running(plan, None) as server:
            print(f"{plan.name} at {server.url}", flush=True)
            curves[plan.name] = _sweep(config, server.url, rates, objective)
        print(f"{_render_curve(curves[plan.name])}\n", flush=True)
    print(_render_best(curves, config.sweep.attainment))
    write_results(config.output.output, "sweep", config, _describe(curves, config.sweep.attainment))
    if config.plots.plot is not None:
        plot_sweep(config.plots.plot, curves, objective)
    return _report_lost(curves)


def _check(config: SweepConfig, objective: Objective) -> list[float]:
    """The rates that the user wants; none = search.

    Raises:
        ConfigError: settings that are wrong or do not go together.
    """
    if not objective.is_set:
        raise ConfigError("there is no objective; give --slo-ttft-ms, --slo-itl-ms, --slo-tpot-ms or --slo-e2e-ms")
    settings, defaults = config.sweep, SweepSettings()
    if settings.url is not None and (settings.splits, settings.thresholds) != (defaults.splits, defaults.thresholds):
        raise ConfigError("--splits and --thresholds are for services that the sweep starts; --url names one that runs")
    engine_model = config.engine.model
    unserved = dataclasses.replace(config.engine, model=dataclasses.replace(engine_model, served_model_name=None))
    if settings.url is not None and unserved != EngineConfig():
        raise ConfigError("the engine's settings are for services that the sweep starts; --url names one that runs")
    if settings.rates and (settings.start_rate, settings.refinements) != (defaults.start_rate, defaults.refinements):
        raise ConfigError("--start-rate and --refinements are for the search; --rates names the rates to try")
    rates = []
    for text in settings.rates or [str(settings.start_rate)]:
        flag = "--rates" if settings.rates else "--start-rate"
        try:
            rate = float(text)
        except ValueError:
            raise ConfigError(f"{flag}: {text!r} is not a number") from None
        if not (rate > 0 and math.isfinite(rate)):
            raise ConfigError(f"{flag}: {text} is no rate; give requests a second above 0")
        rates.append(rate)
    return rates if settings.rates else []


def plan_deployments(config: SweepConfig) -> list[ServerPlan]:
    """Every combination of split and threshold that differs; or the one service that runs.

    Raises:
        ConfigError: a split or threshold does not read.
    """
    settings = config.sweep
    if settings.url is not None:
        url = base_url(settings.url)
        return [ServerPlan(url, (), url)]
    plans = []
    for split in map(Split.parse, settings.splits):
        # Without a prefill pool nothing is handed off whatever the threshold.
        thresholds = settings.thresholds if split.prefill else settings.thresholds[:1]
        for text in thresholds:
            if not text.isdecimal():
                raise ConfigError(f"--thresholds: {text!r} is no number of tokens")
            plans.append(plan_pdserve(split, config.engine, threshold_tokens=int(text)))
    return plans


def _sweep(config: SweepConfig, url: str, rates: Sequence[float], objective: Objective) -> list[RatePoint]:
    settings = config.sweep
    named = config.engine.model.served_model_name
    model = find_model(url, named, flag="--served-model-name")
    tokenizer = find_tokenizer(config.workload.tokenizer, model)
    measurer = Measurer(config.target, tokenizer, config.output.progress)
    num_measured = 0

    def measure(rate: float) -> Summary:
        nonlocal num_measured
        num_measured += 1
        num_requests = max(_MIN_REQUESTS, round(rate * settings.point_s))
        measurement = measurer.measure(
            url,
            model,
            dataclasses.replace(config.workload, num_requests=num_requests),
            dataclasses.replace(config.load, rate=rate),
            round_index=num_measured,
            label=f"{rate:.3g} requests/s",
            objective=objective,
        )
        return measurement.summary

    if rates:
        return measure_rates(measure, rates)
    return search_rates(
        measure,
        start_rate=settings.start_rate,
        attainment=settings.attainment,
        num_refinements=settings.refinements,
    )


def _render_curve(points: Sequence[RatePoint]) -> str:
    heading = ["requests/s sent", "TTFT p50", "p99 ms", "ITL p50", "p99 ms", "within objective", "goodput", "lost"]
    rows = [heading]
    for point in points:
        summary = point.summary
        rows.append(
            [
                format_number(point.rate),
                *_render_tail(summary.ttft_s),
                *_render_tail(summary.itl_s),
                format_share(summary.attainment),
                format_number(summary.goodput),
                str(summary.num_lost),
            ]
        )
    return format_table(rows)


def _render_tail(values: Distribution | None) -> tuple[str, str]:
    return (MISSING, MISSING) if values is None else (format_ms(values.p50), format_ms(values.p99))


def _render_best(curves: dict[str, list[RatePoint]], attainment: float) -> str:
    rows = [["deployment", f"highest rate with {attainment:.0%} good", "goodput there"]]
    for name, points in curves.items():
        best = find_best(points, attainment)
        cells = (MISSING, MISSING) if best is None else (format_number(best.rate), format_number(best.summary.goodput))
        rows.append([name, *cells])
    return format_table(rows)


def _describe(curves: dict[str, list[RatePoint]], attainment: float) -> dict[str, Any]:
    bests = {name: find_best(points, attainment) for name, points in curves.items()}
    return {
        "deployments": {
            name: {
                "points": [{"rate": point.rate, "summary": describe_summary(point.summary)} for point in points],
                "best_rate": None if (best := bests[name]) is None else best.rate,
            }
            for name, points in curves.items()
        }
    }


def _report_lost(curves: dict[str, list[RatePoint]]) -> int:
    """Tell what was lost over all; the exit status."""
    summaries = [point.summary for points in curves.values() for point in points]
    merged: dict[str, LostKind] = {}
    for lost in (lost for summary in summaries for lost in summary.lost):
        earlier = merged.get(lost.kind, LostKind(lost.kind, 0, lost.example))
        merged[lost.kind] = dataclasses.replace(earlier, count=earlier.count + lost.count)
    num_lost = sum(summary.num_lost for summary in summaries)
    if num_lost:
        print(f"\n{render_lost(merged.values(), num_lost, sum(summary.num_requests for summary in summaries))}")
    return 1 if num_lost else 0
