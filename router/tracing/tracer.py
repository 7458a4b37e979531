"""Who gets the traces: nobody, or a collector that speaks OTLP over HTTP."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Protocol

import pdserve
from pdserve.errors import ConfigError
from pdserve.router.config import TracingSettings
from pdserve.router.timeline import RequestTimeline
from pdserve.router.tracing.spans import ROUTER, Span, build_spans

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor

_SERVICES = (ROUTER, "prefill", "decode")
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?")
"""Source: W3C Trace Context, 3.2. A version above 00 may have more fields."""


class RequestTracer(Protocol):
    """Hears of every request's end. Called on the event loop; must not block."""

    def emit(self, timeline: RequestTimeline, traceparent: str) -> None:
        """A request has ended.

        Args:
            timeline: its timeline, complete.
            traceparent: the client's header of this name, as it came; empty where there was none.
        """
        ...

    def close(self) -> None:
        """Send what waits; may take seconds."""
        ...


class NullTracer:
    """Traces nothing."""

    def emit(self, timeline: RequestTimeline, traceparent: str) -> None:
        """Drop it."""

    def close(self) -> None:
        """Nothing waits."""


class OtelTracer:
    """Makes OpenTelemetry spans of timelines, a service for the router and one for each role.

    Args:
        model: the name in the API.
        processor: gets the spans; the batching one works in a thread of its own.
        sample_ratio: the share of requests without a client's decision that are traced.
    """

    def __init__(self, model: str, processor: SpanProcessor, sample_ratio: float = 1.0) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

        self._model = model
        self._processor = processor
        self._tracers = {}
        for service in _SERVICES:
            resource = Resource.create({"service.name": f"pdserve-{service}", "service.version": pdserve.__version__})
            sampler = ParentBasedTraceIdRatio(sample_ratio)
            provider = TracerProvider(resource=resource, sampler=sampler, shutdown_on_exit=False)
            provider.add_span_processor(processor)
            self._tracers[service] = provider.get_tracer("pdserve.router", pdserve.__version__)

    def emit(self, timeline: RequestTimeline, traceparent: str) -> None:
        """Make the spans, all of one trace: the client's where it sent one."""
        self._emit(build_spans(timeline, self._model), _read_parent(traceparent), is_root=True)

    def close(self) -> None:
        """Send what waits, and stop."""
        self._processor.shutdown()

    def _emit(self, span: Span, parent: Context | None, *, is_root: bool = False) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        made = self._tracers[span.service].start_span(
            span.name,
            context=parent,
            kind=SpanKind.SERVER if is_root else SpanKind.INTERNAL,
            attributes=span.attributes,
            start_time=span.start_ns,
        )
        if made.is_recording():
            for event in span.events:
                made.add_event(event.name, event.attributes, event.time_ns)
            if span.error:
                made.set_status(Status(StatusCode.ERROR, span.error))
        context = set_span_in_context(made)
        for child in span.children:
            self._emit(child, context)
        made.end(span.end_ns)


def build_tracer(settings: TracingSettings, model: str) -> RequestTracer:
    """The tracer that the settings ask for.

    Raises:
        ConfigError: an endpoint is set and the packages that speak to it are not installed.
    """
    if settings.otlp_endpoint is None:
        return NullTracer()
    if not re.match(r"https?://[^/]", settings.otlp_endpoint):
        raise ConfigError(f"--otlp-endpoint {settings.otlp_endpoint} is not a URL like http://collector:4318/v1/traces")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"--otlp-endpoint needs pip install 'pdserve[otel]' ({error})") from None
    exporter = OTLPSpanExporter(endpoint=settings.otlp_endpoint)
    return OtelTracer(model, BatchSpanProcessor(exporter), settings.trace_sample_ratio)


def _read_parent(traceparent: str) -> Context:
    """The client's span as the parent; a header that is none begins a new trace."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if not _TRACEPARENT.fullmatch(traceparent):
        return Context()
    return TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())
