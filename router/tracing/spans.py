"""A request's timeline as a tree of spans: plain values that know nothing of OpenTelemetry.

request                       router      arrived … finished
  prepare                     router      arrived … tokenized
  prefill leg, decode leg     the leg's   sent … its last event
    queue                     the leg's   queued … first scheduled, or its load begun
    prefill                   the leg's   first scheduled … first token; each chunk an event
    kv_save                   prefill     first token … KV can be fetched
    kv_load                   decode      begun … all there, or failed
    decode_wait               decode      KV there … its first step begins
    decode                    the leg's   first token, or that step's begin … finished
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pdserve.router.timeline import RequestTimeline, TimelineEntry

Value = str | int | float | bool

ROUTER = "router"
_GOOD_OUTCOMES = ("stop", "length")
_OPERATIONS = {"chat": "chat", "completions": "text_completion"}

_STAGES = (
    ("queue", ("queued",), ("kv_load_started", "prefill_started")),
    ("kv_load", ("kv_load_started",), ("kv_loaded", "kv_load_failed")),
    ("prefill", ("prefill_started",), ("first_token",)),
    ("kv_save", ("first_token",), ("kv_saved",)),
    ("decode_wait", ("kv_loaded", "kv_load_failed"), ("first_decode_step",)),
    ("decode", ("first_decode_step", "first_token"), ("finished",)),
)
"""Of a leg: name, the events that begin it, the events that end it; the first of each that there is."""
_EVENTS = {"prefill": ("prefill_chunk",), "kv_load": ("kv_load_failed",), "decode": ("preempted",)}


@dataclass(slots=True)
class SpanEvent:
    """A moment inside a span."""

    name: str
    time_ns: int
    attributes: dict[str, Value]


@dataclass(slots=True)
class Span:
    """A stretch of time.

    Attributes:
        name: what happened.
        service: ``router``, ``prefill`` or ``decode``.
        start_ns: wall clock of the service.
        end_ns: not before ``start_ns``.
        attributes: by OpenTelemetry's names for generative AI where it has some, else below ``pdserve.``.
        events: moments inside.
        children: spans inside.
        error: why it failed; empty where it did not.
    """

    name: str
    service: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Value] = field(default_factory=dict)
    events: list[SpanEvent] = field(default_factory=list)
    children: list[Span] = field(default_factory=list)
    error: str = ""


@dataclass(slots=True)
class _Leg:
    choice: int
    role: str
    instance_id: str
    entries: list[TimelineEntry]


def build_spans(timeline: RequestTimeline, model: str) -> Span:
    """The request's span with all others inside.

    Args:
        timeline: of a request that has ended.
        model: the name in the API.
    """
    entries, summary = timeline.entries, timeline.summary
    outcome = str(summary.get("outcome", ""))
    root = _span("request", ROUTER, entries)
    root.error = "" if outcome in _GOOD_OUTCOMES else outcome
    root.attributes = {
        "gen_ai.operation.name": _OPERATIONS.get(str(summary.get("endpoint")), "text_completion"),
        "gen_ai.request.model": model,
        "gen_ai.response.id": timeline.response_id,
        "gen_ai.usage.input_tokens": int(summary.get("prompt_tokens", 0)),
        "gen_ai.usage.output_tokens": int(summary.get("completion_tokens", 0)),
        "pdserve.request_id": timeline.request_id,
        "pdserve.outcome": outcome,
    }
    root.events = _events(entries, ("retried",))
    prepared = [entry for entry in entries if entry.name in ("arrived", "tokenized")]
    if len(prepared) > 1:
        root.children.append(_span("prepare", ROUTER, prepared))
    root.children += [_build_leg(leg) for leg in _split_legs(timeline)]
    return root


def _split_legs(timeline: RequestTimeline) -> list[_Leg]:
    """The legs with their events: what an instance tells belongs to the last leg that its choice had there."""
    named = iter(timeline.instances)
    legs: list[_Leg] = []
    for entry in timeline.entries:
        if entry.source == ROUTER:
            if entry.name in ("prefill_sent", "decode_sent") and (known := next(named, None)) is not None:
                legs.append(_Leg(entry.choice, known["role"], known["instance_id"], [entry]))
            continue
        own = (leg for leg in reversed(legs) if leg.choice == entry.choice and leg.instance_id == entry.source)
        leg = next(own, None)
        if leg is not None:
            leg.entries.append(entry)
    return legs


def _build_leg(leg: _Leg) -> Span:
    span = _span(f"{leg.role} leg", leg.role, leg.entries)
    span.attributes = {"pdserve.instance_id": leg.instance_id, "pdserve.choice": leg.choice}
    first: dict[str, TimelineEntry] = {}
    for entry in leg.entries:
        first.setdefault(entry.name, entry)
    for name, begins, ends in _STAGES:
        begin = next((first[event] for event in begins if event in first), None)
        end = next((first[event] for event in ends if event in first), None)
        if begin is None or end is None or end.time_ns < begin.time_ns:
            continue
        stage = Span(name, leg.role, begin.time_ns, end.time_ns)
        stage.attributes = {f"pdserve.{key}": value for key, value in end.detail.items()}
        stage.events = _events(leg.entries, _EVENTS.get(name, ()))
        stage.error = "the KV could not be loaded and is computed again" if end.name == "kv_load_failed" else ""
        span.children.append(stage)
    return span


def _span(name: str, service: str, entries: Sequence[TimelineEntry]) -> Span:
    times = [entry.time_ns for entry in entries]
    return Span(name, service, min(times), max(times))


def _events(entries: Iterable[TimelineEntry], names: Sequence[str]) -> list[SpanEvent]:
    return [SpanEvent(entry.name, entry.time_ns, dict(entry.detail)) for entry in entries if entry.name in names]
