"""Pictures of results, with matplotlib where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.bench.measure.samples import RequestSample
from pdserve.bench.measure.summary import Distribution, Objective
from pdserve.bench.rate_search import RatePoint
from pdserve.bench.show.results import check_writable
from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 120


def check_plot(path: str | None) -> None:
    """Find out before a long measurement whether it could be drawn.

    Raises:
        ConfigError: it could not; says why.
    """
    if path is None:
        return
    if Path(path).suffix.lower() != ".png":
        raise ConfigError(f"--plot {path}: only .png files are drawn")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install 'pdserve[bench]'")
    check_writable(path, "--plot")


def plot_run(path: str, samples: Sequence[RequestSample], title: str) -> None:
    """Draw one run: ITL and TTFT over time.

    Args:
        path: the PNG file.
        samples: of the run; lost requests are marked on the time axis.
        title: stands above.
    """
    figure, (itl_axes, ttft_axes) = _make_axes(2)
    whole = [sample for sample in samples if sample.failure is None and sample.event_times_s]
    gap_ends = [time_s for sample in whole for time_s in sample.event_times_s[1:]]
    gaps_ms = [gap * 1000 for sample in whole for gap in sample.itls_s]
    itl_axes.scatter(gap_ends, gaps_ms, s=3, alpha=0.4, linewidths=0)
    itl_axes.set_ylabel("between tokens, ms")
    ttft_axes.scatter([sample.event_times_s[0] for sample in whole], [sample.ttft_s * 1000 for sample in whole], s=8)
    ttft_axes.set_ylabel("first token after, ms")
    ttft_axes.set_xlabel("seconds since the run began")
    lost_s = [sample.end_s for sample in samples if sample.failure is not None]
    if lost_s:
        ttft_axes.plot(lost_s, [0.0] * len(lost_s), "rx", label=f"{len(lost_s)} lost")
        ttft_axes.legend()
    itl_axes.set_title(title)
    figure.savefig(path, dpi=_DPI)


def plot_sweep(path: str, curves: Mapping[str, Sequence[RatePoint]], objective: Objective) -> None:
    """Draw latency and goodput against rate, a line for each deployment.

    Args:
        path: the PNG file.
        curves: points in ascending order of rate, by deployment.
        objective: its bounds are drawn as lines.
    """
    figure, (ttft_axes, itl_axes, goodput_axes) = _make_axes(3)
    for name, points in curves.items():
        rates = [point.rate for point in points]
        _draw_latencies(ttft_axes, name, rates, [point.summary.ttft_s for point in points])
        _draw_latencies(itl_axes, name, rates, [point.summary.itl_s for point in points])
        goodput_axes.plot(rates, [point.summary.goodput or 0.0 for point in points], marker="o", label=name)
    for axes, label, bound_s in (
        (ttft_axes, "first token", objective.ttft_s),
        (itl_axes, "between tokens", objective.itl_s),
    ):
        axes.set_ylabel(f"{label}, ms")
        axes.set_yscale("log")
        if bound_s is not None:
            axes.axhline(bound_s * 1000, color="grey", lw=0.8, ls=":")
    goodput_axes.set_ylabel("good requests/s")
    goodput_axes.set_xlabel("requests/s sent")
    ttft_axes.legend(fontsize="small")
    goodput_axes.legend(fontsize="small")
    figure.savefig(path, dpi=_DPI)


def _draw_latencies(axes: Axes, name: str, rates: Sequence[float], values: Sequence[Distribution | None]) -> None:
    """Median and 99th percentile of one deployment in one colour; points without a value are left out."""
    there = [(rate, value) for rate, value in zip(rates, values, strict=True) if value is not None]
    known_rates = [rate for rate, _ in there]
    medians_ms = [value.p50 * 1000 for _, value in there]
    tails_ms = [value.p99 * 1000 for _, value in there]
    (line,) = axes.plot(known_rates, medians_ms, marker="o", label=f"{name} p50")
    axes.plot(known_rates, tails_ms, marker="o", ls="--", color=line.get_color(), label=f"{name} p99")


def _make_axes(num_rows: int) -> tuple[Figure, list[Axes]]:
    """A figure with ``num_rows`` pictures that share the horizontal axis.

    It stands outside of pyplot's global list: no window system is asked for, and nothing stays behind.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2 * num_rows), layout="constrained")
    first = figure.add_subplot(num_rows, 1, 1)
    return figure, [first, *(figure.add_subplot(num_rows, 1, row + 1, sharex=first) for row in range(1, num_rows))]
