"""The HTTP API under requests made from its own OpenAPI document, right ones and wrong ones.

It never fails, and every answer is one that the document promises.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from replay_service import Service
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [status_code_conformance, content_type_conformance]
TIMED_OUT = 504
"""The one failure that a client can ask for: its own time limit."""
GIVING = ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
TELLING = [
    *("/v1/models", "/v1/models/{name}", "/v1/requests/{name}/timeline"),
    *("/v1/status", "/metrics", "/health", "/ready", "/"),
]
OPERATIONS = [("POST", path) for path in GIVING] + [("GET", path) for path in TELLING]
"""All but POST /drain, which ends the router."""
CASES = [(*operation, GenerationMode.POSITIVE) for operation in OPERATIONS]
CASES += [("POST", path, GenerationMode.NEGATIVE) for path in GIVING]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    made = Service(tmp_path_factory.mktemp("http"))
    for role in ("prefill", "decode"):
        made.add(role, "--max-model-len", "64")
    try:
        yield made.start("--max-choices", "4", "--log-level", "warning").wait_for(1, 1)
    finally:
        made.close()


@pytest.fixture(scope="module")
def schema(service: Service) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{service.url}/openapi.json")


def test_every_operation_is_listed(service: Service) -> None:
    paths = httpx.get(f"{service.url}/openapi.json").json()["paths"]
    found = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    assert found == {*OPERATIONS, ("POST", "/drain")}


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_no_request_makes_the_router_fail(
    service: Service, schema: schemathesis.BaseSchema, method: str, path: str, mode: GenerationMode
) -> None:
    operation = schema[path][method]
    num_cases = 25 if method == "POST" else 5

    @seed(7)
    @settings(max_examples=num_cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode))
    def test(case: schemathesis.Case) -> None:
        answer = case.call(timeout=30)
        if answer.status_code != TIMED_OUT:
            assert answer.status_code < 500, answer.text
        # Of a stream the document describes the text; its single events are test_openapi's.
        is_stream = answer.headers["content-type"][0].startswith("text/event-stream")
        case.validate_response(answer, checks=CHECKS if is_stream else [*CHECKS, response_schema_conformance])

    test()
    assert "Traceback" not in service.log.read_text()
    assert service.complete(max_tokens=3).choices[0].finish_reason == "length"
