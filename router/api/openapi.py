"""The OpenAPI document of the router: ``GET /openapi.json``.

Bodies are the types that parse them, and answers the types that they are put together as; paths come from the
application's routes. So the document holds what the code does, and tests hold the two together.

Source: OpenAPI Specification 3.1.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from pdserve.router.api import answer_types as answers
from pdserve.router.api.authentication import PUBLIC_PATHS
from pdserve.router.api.request_types import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    TokenizeFields,
    get_unsupported,
)

_REF = "#/components/schemas/{name}"
_BODY_ERRORS = (400, 404, 413)
_GENERATION_ERRORS = (*_BODY_ERRORS, 429, 500, 503, 504)

_ERRORS = {
    400: "The request is wrong; `param` names the field. Nothing is retried.",
    401: "No API key, or one that is not known.",
    403: "The API key may not do this, or the request does not come from the router's own machine.",
    404: "There is no such model, or no such request.",
    413: "The body is larger than is taken.",
    429: "Every instance is full, the queue is full, or the API key has used what it may.",
    500: "As many instances as may fail a request have failed this one.",
    503: "No instance is up, or the router is stopping.",
    504: "The request took longer than it may.",
}
_ERROR_HEADERS = {
    401: {"WWW-Authenticate": {"schema": {"type": "string"}}},
    429: {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}},
    503: {"Retry-After": {"description": "Seconds.", "schema": {"type": "integer", "minimum": 1}}},
}
_GENERATION_HEADERS: dict[str, dict[str, Any]] = {
    "X-Request-Id": {"type": "string", "description": "Comes back in the answer; one that is odd is replaced."},
    "X-Request-Timeout": {"type": "number", "exclusiveMinimum": 0, "description": "Seconds."},
    "X-Session-Id": {"type": "string", "maxLength": 256, "description": "For the policy `session_affinity`."},
}


@dataclass(frozen=True)
class Operation:
    """One endpoint, as far as its route does not tell.

    Attributes:
        answer: type of the answer's body; a string stands for a body that is no JSON, and is its media type.
        body: type of the request's body.
        event: type of a streamed answer's events.
        errors: statuses of errors, less 401, which all but public paths have.
        status: of the answer.
        headers: of the request, with their schemas.
        also: further statuses with a body of the answer's type.
    """

    answer: Any
    body: type[msgspec.Struct] | None = None
    event: Any = None
    errors: tuple[int, ...] = ()
    status: int = 200
    headers: dict[str, dict[str, Any]] | None = None
    also: tuple[int, ...] = ()


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("post", "/v1/completions"): Operation(
        answers.Completion, CompletionFields, answers.Completion, _GENERATION_ERRORS, headers=_GENERATION_HEADERS
    ),
    ("post", "/v1/chat/completions"): Operation(
        answers.ChatCompletion, ChatFields, answers.ChatChunk, _GENERATION_ERRORS, headers=_GENERATION_HEADERS
    ),
    ("post", "/tokenize"): Operation(answers.Tokens, TokenizeFields, errors=_BODY_ERRORS),
    ("post", "/detokenize"): Operation(answers.Text, DetokenizeFields, errors=_BODY_ERRORS),
    ("get", "/v1/models"): Operation(answers.ModelList),
    ("get", "/v1/models/{name}"): Operation(answers.Model, errors=(404,)),
    ("get", "/v1/requests/{name}/timeline"): Operation(dict[str, Any], errors=(404,)),
    ("get", "/v1/status"): Operation(dict[str, Any]),
    ("get", "/"): Operation("text/html"),
    ("get", "/health"): Operation(answers.Status),
    ("get", "/ready"): Operation(answers.Readiness, also=(503,)),
    ("post", "/drain"): Operation(answers.Status, errors=(403,), status=202),
    ("get", "/metrics"): Operation("text/plain"),
}


def build_document(app: FastAPI) -> dict[str, Any]:
    """The document of an application's routes."""
    document = get_openapi(
        title=app.title,
        version=app.version,
        description="OpenAI's API, and beside it what operators need. Unknown fields are ignored; those that would "
        "change the answer and are not supported may only have values that ask for nothing.",
        routes=app.routes,
    )
    types = list(_collect_types())
    refs, schemas = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(types, refs, strict=True))
    for operation in OPERATIONS.values():
        if operation.body is not None:
            _add_unsupported(schemas[operation.body.__name__], operation.body)
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            _describe(described, path, OPERATIONS[method, path], schema_of)
    document["components"] = {
        "schemas": schemas,
        "securitySchemes": {"apiKey": {"type": "http", "scheme": "bearer", "description": "Where keys are asked for."}},
    }
    return document


def _collect_types() -> Iterator[Any]:
    for operation in OPERATIONS.values():
        kinds = (operation.answer, operation.body, operation.event)
        yield from (kind for kind in kinds if kind is not None and not isinstance(kind, str))
    yield answers.ErrorBody


def _describe(described: dict[str, Any], path: str, operation: Operation, schema_of: dict[Any, Any]) -> None:
    """Fill in what the route does not know."""
    content = _describe_answer(operation, schema_of)
    described["responses"] = {
        str(status): {"description": "The answer.", "content": content}
        for status in (operation.status, *operation.also)
    }
    is_public = path in PUBLIC_PATHS
    error_content = {"application/json": {"schema": schema_of[answers.ErrorBody]}}
    for status in sorted({*operation.errors, *(() if is_public else (401,))}):
        described["responses"][str(status)] = {
            "description": _ERRORS[status],
            "headers": _ERROR_HEADERS.get(status, {}),
            "content": error_content,
        }
    if not is_public:
        described["security"] = [{}, {"apiKey": []}]
    if operation.body is not None:
        body = {"application/json": {"schema": schema_of[operation.body]}}
        described["requestBody"] = {"required": True, "content": body}
    for name, schema in (operation.headers or {}).items():
        described.setdefault("parameters", []).append({"name": name, "in": "header", "schema": schema})


def _describe_answer(operation: Operation, schema_of: dict[Any, Any]) -> dict[str, Any]:
    if isinstance(operation.answer, str):
        return {operation.answer: {"schema": {"type": "string"}}}
    content = {"application/json": {"schema": schema_of[operation.answer]}}
    if operation.event is not None:
        events = [schema_of[operation.event], schema_of[answers.ErrorBody]]
        content["text/event-stream"] = {
            "schema": {
                "type": "string",
                "description": "With `stream`: server-sent events, each one line `data: ` with an object of "
                "`x-event-schema`; the last line is `data: [DONE]`. An error after the first token is an event.",
                "x-event-schema": {"anyOf": events},
            }
        }
    return content


def _add_unsupported(schema: dict[str, Any], kind: type[msgspec.Struct]) -> None:
    """The fields that are refused unless they ask for nothing."""
    for name, values in get_unsupported(kind).items():
        schema["properties"][name] = {"enum": [*values, None], "description": "Not supported."}
