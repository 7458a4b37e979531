"""Errors on their way to a router."""

from __future__ import annotations

from pdserve.errors import PdserveError, RequestError
from pdserve.protocol import FinishReason, RequestOutput, WireError


def error_output(request_id: str, error: PdserveError) -> RequestOutput:
    """The last output of a request that ``error`` ended."""
    wire_error = WireError(
        code=error.code,
        message=error.message,
        http_status=error.http_status,
        param=error.param if isinstance(error, RequestError) else None,
        retryable=error.retryable,
    )
    return RequestOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=wire_error)
