"""The edge of the application: every answer names its request, and no error shows its inside."""

from __future__ import annotations

import logging
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdserve.errors import EngineError
from pdserve.router.api.errors import error_response

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class HttpBoundary:
    """Middleware around the whole application.

    It takes the client's X-Request-Id where it is a plain one, makes one otherwise, puts it into
    ``scope["state"]["request_id"]`` and into the answer, and answers 500 for an error that nobody expected. HEAD is
    answered as GET; the server leaves the body out.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; called by the ASGI server."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        has_begun = False

        async def send_named(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(inner, receive, send_named)
        except Exception:
            logger.exception("request %s failed in the router", request_id)
            if not has_begun:
                await error_response(EngineError("the router failed on this request"))(scope, receive, send_named)
