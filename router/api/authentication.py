"""Who may ask: every path wants an API key, but those that tell nothing."""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pdserve.errors import RequestError
from pdserve.router.api.errors import error_response
from pdserve.router.keys.api_key import ApiKey
from pdserve.router.keys.key_ring import KeyRing

PUBLIC_PATHS = frozenset(("/", "/health", "/ready"))
"""The page holds nothing and asks for a key itself; whoever probes for health has none."""


class Authentication:
    """Middleware that finds the client's key, or answers 401.

    It puts the key's name into ``scope["state"]["key_id"]``, and into ``"is_admin"`` whether it is an administrator's.
    Source: RFC 6750 for the scheme, OpenAI's reference for the answer's body.

    Args:
        app: what is protected.
        key_ring: the keys that are valid.
        count_refused: called for each 401.
        public_paths: paths that need no key.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        key_ring: KeyRing,
        count_refused: Callable[[], None],
        public_paths: frozenset[str] = PUBLIC_PATHS,
    ) -> None:
        self._app = app
        self._key_ring = key_ring
        self._count_refused = count_refused
        self._public_paths = public_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; called by the ASGI server."""
        if scope["type"] != "http" or scope["path"] in self._public_paths:
            await self._app(scope, receive, send)
            return
        try:
            key = self._find_key(Headers(scope=scope).get("authorization", ""))
        except RequestError as error:
            self._count_refused()
            await error_response(error)(scope, receive, send)
            return
        scope.setdefault("state", {}).update(key_id=key.name, is_admin=key.is_admin)
        await self._app(scope, receive, send)

    def _find_key(self, authorization: str) -> ApiKey:
        scheme, _, secret = authorization.partition(" ")
        if scheme.lower() != "bearer" or not secret.strip():
            raise RequestError(
                "an API key is needed; send it as the header Authorization: Bearer KEY",
                code="missing_api_key",
                http_status=401,
            )
        key = self._key_ring.find(secret.strip().encode("latin-1"))
        if key is None:
            raise RequestError("this API key is not valid here", code="invalid_api_key", http_status=401)
        return key
