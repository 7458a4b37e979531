"""What clients say beside the body."""

from __future__ import annotations

import math

from starlette.datastructures import Headers

from pdserve.errors import RequestError

_MAX_SESSION_CHARACTERS = 256


def read_timeout(headers: Headers, limit_s: float) -> float:
    """How long the request may take, in seconds: X-Request-Timeout, but never more than ``limit_s``.

    Raises:
        RequestError: the header is no number above 0.
    """
    text = headers.get("x-request-timeout")
    if text is None:
        return limit_s
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not timeout_s > 0:
        raise RequestError(
            f"X-Request-Timeout is {text[:32]!r}; it must be a number of seconds above 0", param="X-Request-Timeout"
        )
    return min(timeout_s, limit_s)


def read_session_id(headers: Headers) -> str:
    """X-Session-Id, for policies that keep a session at one instance; empty without one.

    Raises:
        RequestError: it is too long.
    """
    session_id = headers.get("x-session-id", "")
    if len(session_id) > _MAX_SESSION_CHARACTERS:
        raise RequestError(f"X-Session-Id may have {_MAX_SESSION_CHARACTERS} characters at most", param="X-Session-Id")
    return session_id
