"""Errors as clients see them: OpenAI's body, the right status, and nothing of the inside."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from starlette.responses import Response

from pdserve.errors import OverloadedError, PdserveError, RequestError
from pdserve.router.api.answer_types import ErrorBody

_TYPES = {429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}


def describe_error(error: PdserveError) -> ErrorBody:
    """The body: ``{"error": {"message", "type", "param", "code"}}``."""
    kind = _TYPES.get(error.http_status)
    if kind is None:
        kind = "invalid_request_error" if error.http_status < 500 else "server_error"
    param = error.param if isinstance(error, RequestError) else None
    return {"error": {"message": error.message, "type": kind, "param": param, "code": error.code}}


def error_response(error: PdserveError) -> Response:
    """The answer to a request that failed before its own answer began."""
    headers: dict[str, str] = {}
    if isinstance(error, OverloadedError):
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
    elif error.http_status == 503:
        headers["retry-after"] = "1"
    elif error.http_status in (401, 413):
        # The rest of the body is not read.
        headers["connection"] = "close"
    if error.http_status == 401:
        problem = ', error="invalid_token"' if error.code == "invalid_api_key" else ""
        headers["www-authenticate"] = f'Bearer realm="pdserve"{problem}'
    return json_response(describe_error(error), status=error.http_status, headers=headers)


def json_response(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """``value`` as JSON."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json", headers=headers)
