"""A router process sends its traces to a collector."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from replay_service import Service

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


class Collector:
    """Takes OTLP over HTTP and keeps it."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                collector.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    @property
    def spans(self) -> dict[str, set[str]]:
        """Names of the spans of the client's trace, by service."""
        found: dict[str, set[str]] = {}
        for request in self.requests:
            for resource in request.resource_spans:
                names = {a.key: a.value.string_value for a in resource.resource.attributes}
                for scope in resource.scope_spans:
                    own = {span.name for span in scope.spans if span.trace_id.hex() == TRACE_ID}
                    found.setdefault(names["service.name"], set()).update(own)
        return found

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path)
    yield made
    made.close()


def test_one_trace_goes_from_the_client_through_all_services(service: Service, collector: Collector) -> None:
    service.add("prefill")
    service.add("decode")
    service.start("--otlp-endpoint", collector.url).wait_for(1, 1)
    body = {"model": "smollm2-135m-instruct", "prompt": "SECRET-PROMPT", "max_tokens": 5}
    headers = {"traceparent": f"00-{TRACE_ID}-00f067aa0ba902b7-01"}
    assert httpx.post(f"{service.url}/v1/completions", json=body, headers=headers, timeout=30).status_code == 200
    # What waits is sent when the router ends.
    assert service.router is not None
    service.router.terminate()
    assert service.router.wait(30) == 0
    assert collector.spans == {
        "pdserve-router": {"request", "prepare"},
        "pdserve-prefill": {"prefill leg", "queue", "prefill", "kv_save"},
        "pdserve-decode": {"decode leg", "queue", "kv_load", "decode_wait", "decode"},
    }
    assert not any(b"SECRET" in request.SerializeToString() for request in collector.requests)
