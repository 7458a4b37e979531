"""Which server is measured, and how requests to it are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from pdserve.errors import ConfigError
from pdserve.settings import setting


@dataclass(frozen=True)
class TargetSettings:
    """The server."""

    url: str | None = setting(
        "http://127.0.0.1:8000", help="any server that speaks the OpenAI API, with or without /v1", metavar="URL"
    )
    model: str | None = setting(None, help="model to ask for; default: the first that the server lists")
    endpoint: str = setting(
        "completions", choices=("completions", "chat"), help="completions, or chat with its template around prompts"
    )
    ignore_eos: bool = setting(True, help="ask for answers of full length, so that every server does the same work")
    extra_body: dict[str, Any] = setting({}, help="more fields for every request's body, over what is sent otherwise")
    request_timeout_s: float = setting(600.0, help="a request that takes longer is lost", minimum=0.1)


def base_url(url: str, flag: str = "--url") -> str:
    """``url`` without a trailing slash or /v1.

    Raises:
        ConfigError: it is no HTTP address.
    """
    parts = urlsplit(url)
    try:
        is_valid = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or parts.query or parts.fragment:
        raise ConfigError(f"{flag}: {url!r} is no address of a server; write http://HOST:PORT")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
