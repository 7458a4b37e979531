from __future__ import annotations

import pytest

from pdserve.protocol import Role, TimelineEvent
from pdserve.router.timeline import RequestTimeline, TimelineEntry
from pdserve.router.tracing.spans import Span, build_spans

WAY = [
    ("router", "arrived", 0, {}),
    ("router", "tokenized", 5, {"num_tokens": 40}),
    ("router", "prefill_sent", 6, {}),
    ("p0", "queued", 8, {}),
    ("p0", "prefill_started", 10, {}),
    ("p0", "prefill_chunk", 20, {"num_tokens": 32}),
    ("p0", "prefill_chunk", 28, {"num_tokens": 8}),
    ("p0", "first_token", 30, {}),
    ("p0", "kv_saved", 36, {"num_bytes": 1000}),
    ("router", "decode_sent", 38, {}),
    ("d0", "queued", 40, {}),
    ("d0", "kv_load_started", 41, {}),
    ("d0", "kv_loaded", 50, {"num_bytes": 1000}),
    ("d0", "prefill_started", 51, {}),
    ("d0", "first_decode_step", 55, {}),
    ("d0", "finished", 90, {}),
    ("router", "finished", 92, {"num_tokens": 9}),
]
ROLES = {"p0": Role.PREFILL, "d0": Role.DECODE, "d1": Role.DECODE}


def build_timeline(way: list[tuple[str, str, int, dict[str, float]]], outcome: str = "stop") -> RequestTimeline:
    timeline = RequestTimeline("cmpl-1", "x-1")
    targets = iter([source for source, name, *_ in way if name == "queued"])
    for source, name, time_ns, detail in way:
        if source == "router":
            timeline.entries.append(TimelineEntry(name, time_ns, "router", 0, detail))
            if name.endswith("_sent"):
                target = next(targets, "d0")
                timeline.instances.append({"choice": 0, "role": str(ROLES[target]), "instance_id": target})
        else:
            timeline.add_events(0, source, [TimelineEvent(name, time_ns, detail)])
    timeline.summary = {"outcome": outcome, "endpoint": "chat", "prompt_tokens": 40, "completion_tokens": 9}
    return timeline


def flatten(span: Span) -> list[tuple[str, str, int, int]]:
    inner = [row for child in span.children for row in flatten(child)]
    return [(span.service, span.name, span.start_ns, span.end_ns), *inner]


def test_each_stage_of_the_way_is_a_span_at_its_service() -> None:
    root = build_spans(build_timeline(WAY), "m")
    assert flatten(root) == [
        ("router", "request", 0, 92),
        ("router", "prepare", 0, 5),
        ("prefill", "prefill leg", 6, 36),
        ("prefill", "queue", 8, 10),
        ("prefill", "prefill", 10, 30),
        ("prefill", "kv_save", 30, 36),
        ("decode", "decode leg", 38, 90),
        ("decode", "queue", 40, 41),
        ("decode", "kv_load", 41, 50),
        ("decode", "decode_wait", 50, 55),
        ("decode", "decode", 55, 90),
    ]
    assert root.error == ""
    assert root.attributes["gen_ai.usage.input_tokens"] == 40
    prefill = root.children[1].children[1]
    assert [(event.time_ns, event.attributes["num_tokens"]) for event in prefill.events] == [(20, 32), (28, 8)]
    assert root.children[2].children[1].attributes == {"pdserve.num_bytes": 1000}


def test_lost_legs_and_failed_loads_show() -> None:
    lost = [
        *WAY[:12],
        ("d0", "kv_load_failed", 45, {}),
        ("router", "retried", 60, {}),
        ("router", "decode_sent", 61, {}),
        ("d1", "queued", 62, {}),
        ("d1", "prefill_started", 63, {}),
        ("d1", "first_decode_step", 70, {}),
        ("router", "finished", 92, {}),
    ]
    root = build_spans(build_timeline(lost, "timeout"), "m")
    assert root.error == "timeout"
    assert [event.name for event in root.events] == ["retried"]
    legs = [span for span in root.children if span.name == "decode leg"]
    assert [leg.attributes["pdserve.instance_id"] for leg in legs] == ["d0", "d1"]
    assert "could not be loaded" in legs[0].children[-1].error


@pytest.mark.parametrize("num_events", range(1, len(WAY)))
def test_any_way_that_ends_early_has_spans(num_events: int) -> None:
    for _, name, start_ns, end_ns in flatten(build_spans(build_timeline(WAY[:num_events], "error"), "m")):
        assert start_ns <= end_ns, name
