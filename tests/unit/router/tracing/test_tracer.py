from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from pdserve.errors import ConfigError
from pdserve.protocol import Role, TimelineEvent
from pdserve.router.config import TracingSettings
from pdserve.router.timeline import RequestTimeline
from pdserve.router.tracing.tracer import NullTracer, OtelTracer, build_tracer

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"


def build_timeline() -> RequestTimeline:
    timeline = RequestTimeline("cmpl-1", "x-1")
    timeline.add("arrived")
    timeline.add("tokenized")
    for role in (Role.PREFILL, Role.DECODE):
        timeline.add_leg(0, role, f"{role}-0", "127.0.0.1:1")
        start_ns = timeline.entries[-1].time_ns
        names = ("queued", "prefill_started", "first_token" if role is Role.PREFILL else "first_decode_step")
        timeline.add_events(0, f"{role}-0", [TimelineEvent(name, start_ns + i) for i, name in enumerate(names)])
    timeline.add("finished")
    timeline.summary = {"outcome": "stop", "endpoint": "completions", "prompt_tokens": 3, "completion_tokens": 2}
    return timeline


def trace(traceparent: str = "", sample_ratio: float = 1.0, outcome: str = "stop") -> dict[str, ReadableSpan]:
    exporter = InMemorySpanExporter()
    tracer = OtelTracer("m", SimpleSpanProcessor(exporter), sample_ratio)
    timeline = build_timeline()
    timeline.summary["outcome"] = outcome
    tracer.emit(timeline, traceparent)
    return {span.name: span for span in exporter.get_finished_spans()}


def test_all_services_share_the_clients_trace() -> None:
    spans = trace(f"00-{TRACE_ID}-{PARENT_ID}-01")
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE_ID}
    root = spans["request"]
    assert f"{root.parent.span_id:016x}" == PARENT_ID
    assert root.kind is SpanKind.SERVER
    for name in ("prepare", "prefill leg", "decode leg"):
        assert spans[name].parent.span_id == root.context.span_id
    assert spans["prefill"].parent.span_id == spans["prefill leg"].context.span_id
    services = {name: span.resource.attributes["service.name"] for name, span in spans.items()}
    assert services["request"] == "pdserve-router"
    assert services["prefill"] == "pdserve-prefill"
    assert services["decode leg"] == "pdserve-decode"
    assert all(span.start_time <= span.end_time for span in spans.values())


@pytest.mark.parametrize("header", ["", "garbage", f"00-{'0' * 32}-{PARENT_ID}-01", f"ff-{TRACE_ID}-{PARENT_ID}-01"])
def test_without_a_valid_header_a_new_trace_begins(header: str) -> None:
    root = trace(header)["request"]
    assert root.parent is None
    assert f"{root.context.trace_id:032x}" != TRACE_ID


def test_the_clients_decision_counts_and_else_the_ratio() -> None:
    assert trace(f"00-{TRACE_ID}-{PARENT_ID}-00") == {}
    assert trace(sample_ratio=0.0) == {}
    assert trace(f"00-{TRACE_ID}-{PARENT_ID}-01", sample_ratio=0.0) != {}


def test_bad_outcomes_are_errors() -> None:
    assert trace()["request"].status.status_code is StatusCode.UNSET
    failed = trace(outcome="engine_error")["request"].status
    assert (failed.status_code, failed.description) == (StatusCode.ERROR, "engine_error")


def test_no_endpoint_no_traces_and_a_wrong_one_is_told() -> None:
    assert isinstance(build_tracer(TracingSettings(), "m"), NullTracer)
    with pytest.raises(ConfigError, match="--otlp-endpoint collector:4318 is not a URL"):
        build_tracer(TracingSettings(otlp_endpoint="collector:4318"), "m")
