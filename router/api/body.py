"""Reading a request's body without holding more than is allowed."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from pdserve.errors import RequestError


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body.

    Raises:
        RequestError: 413, as soon as the length that the client announced, or what has come, is above ``max_bytes``.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    num_bytes = 0
    try:
        async for part in request.stream():
            num_bytes += len(part)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            parts.append(part)
    except ClientDisconnect:
        raise RequestError("the client left before its request was whole", code="client_disconnected") from None
    return b"".join(parts)


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(
        f"the body is larger than {max_bytes} bytes, the most that is taken",
        code="request_too_large",
        http_status=413,
    )
