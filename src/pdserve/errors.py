"""Every error pdserve raises on purpose.

The tree::

    PdserveError                 code, http_status, retryable
    ├── ConfigError              a setting, a file or a port is wrong; raised at start, exit status 2
    ├── RequestError             the client's mistake (4xx); names the parameter
    │   ├── ContextLengthError   the prompt does not fit the model or the cache
    │   └── OverloadedError      429: a queue is full, try again later
    ├── UnavailableError         503: no instance can take the request now
    ├── RequestTimeoutError      504: the request's own deadline passed
    ├── EngineError              500: the engine failed; other requests are not touched
    └── ConnectorError           a KV transfer failed; names the connector, the peer and the request

A message says what is wrong, with the value, and what to do about it. It never holds prompt text.
"""

from __future__ import annotations


class PdserveError(Exception):
    """Base of all errors of pdserve.

    Attributes:
        code: a stable machine-readable name, sent to clients as ``error.code``.
        http_status: the status an HTTP answer carries.
        retryable: whether the same request may succeed on another instance or later.
    """

    code: str = "internal_error"
    http_status: int = 500
    retryable: bool = False

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class ConfigError(PdserveError):
    """A setting, a model file or a port that the process cannot start with."""

    code = "config_error"


class RequestError(PdserveError):
    """The client's mistake.

    Args:
        message: what is wrong, with the value, and what is accepted.
        param: the name of the request field that is wrong, where there is one.
        code: overrides the class's code.
        http_status: overrides 400 (404 for an unknown model, 413 for a body that is too large).
    """

    code = "invalid_value"
    http_status = 400

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        http_status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code
        if http_status is not None:
            self.http_status = http_status


class ContextLengthError(RequestError):
    """The prompt, or prompt and answer together, do not fit the model's limit."""

    code = "context_length_exceeded"


class OverloadedError(RequestError):
    """A bounded queue is full; ``retry_after_s`` is a hint for the client."""

    code = "rate_limit_exceeded"
    http_status = 429
    retryable = True

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(PdserveError):
    """No instance can take the request now."""

    code = "service_unavailable"
    http_status = 503
    retryable = True


class RequestTimeoutError(PdserveError):
    """The request's own deadline passed before it finished."""

    code = "request_timeout"
    http_status = 504


class EngineError(PdserveError):
    """The engine could not serve this request; it goes on serving the others."""

    code = "engine_error"
    retryable = True


class ConnectorError(PdserveError):
    """A KV transfer failed.

    Args:
        message: what happened.
        connector: the connector's registered name.
        peer: the other end (a path, an address or an instance id), where there is one.
        request_id: the request whose KV was moving, where there is one.
    """

    code = "kv_transfer_failed"
    retryable = True

    def __init__(
        self,
        message: str,
        *,
        connector: str,
        peer: str | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.connector = connector
        self.peer = peer
        self.request_id = request_id
