"""A summary as the table that people read."""

from __future__ import annotations

from collections.abc import Iterable

from pdserve.bench.measure.summary import Distribution, LostKind, Summary
from pdserve.bench.show.tables import MISSING, format_ms, format_number, format_share, format_table

_COARSE_EVENTS = 1.05
"""Above this many tokens an event, the time between events is no longer that between tokens."""
_LATE_S = 0.01


def render_summary(summary: Summary) -> str:
    """Latencies, throughput, goodput and losses."""
    parts = [_render_latencies(summary), _render_rates(summary)]
    parts += [f"note: {note}" for note in list_notes(summary)]
    if summary.num_lost:
        parts.append(render_lost(summary.lost, summary.num_lost, summary.num_requests))
    return "\n\n".join(parts)


def _render_latencies(summary: Summary) -> str:
    rows = [["ms", "mean", "p50", "p90", "p99", "max"]]
    for name, values in (
        ("time to first token (TTFT)", summary.ttft_s),
        ("between tokens (ITL)", summary.itl_s),
        ("a token after the first (TPOT)", summary.tpot_s),
        ("end to end", summary.e2e_s),
    ):
        rows.append([name, *_render_distribution(values)])
    return format_table(rows)


def _render_distribution(values: Distribution | None) -> list[str]:
    if values is None:
        return [MISSING] * 5
    return [format_ms(value) for value in (values.mean, values.p50, values.p90, values.p99, values.maximum)]


def _render_rates(summary: Summary) -> str:
    rows = [
        ["", "value"],
        ["requests answered whole", f"{summary.num_ok:,} of {summary.num_requests:,}"],
        ["duration, s", format_number(summary.duration_s)],
        ["requests/s", format_number(summary.requests_per_s)],
        ["output tokens/s", format_number(summary.output_tokens_per_s)],
        ["prompt and output tokens/s", format_number(summary.total_tokens_per_s)],
        ["prompt tokens", f"{summary.num_prompt_tokens:,}"],
        ["output tokens", f"{summary.num_output_tokens:,}"],
    ]
    if summary.goodput is not None:
        rows.append(["goodput, requests/s", format_number(summary.goodput)])
        rows.append(["requests within the objective", format_share(summary.attainment)])
    return format_table(rows)


def list_notes(summary: Summary) -> list[str]:
    """What a reader has to know to read the figures rightly."""
    notes = []
    if summary.num_without_usage:
        notes.append(
            f"the server sent no usage for {summary.num_without_usage} requests: events with text stand for tokens"
        )
    if (coarse := summary.tokens_per_event) is not None and coarse > _COARSE_EVENTS:
        notes.append(f"an event carried {coarse:.2f} tokens on average: ITL is the time between events")
    delay = summary.send_delay_s
    if delay is not None and delay.p99 > _LATE_S:
        notes.append(
            f"requests were sent up to {format_ms(delay.maximum)} ms after they were due"
            f" (p99 {format_ms(delay.p99)} ms): the cap on concurrency, or a client that is short of processor time"
        )
    return notes


def render_lost(lost: Iterable[LostKind], num_lost: int, num_requests: int) -> str:
    """How many requests were lost, and why."""
    lines = [f"lost: {num_lost} of {num_requests} requests; no figure above counts them"]
    lines += [f"  {kind.count} x {kind.kind}: {kind.example}" for kind in lost]
    return "\n".join(lines)
