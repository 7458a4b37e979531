"""Looks at a server before it is measured: whether it is there, and which models it serves."""

from __future__ import annotations

from collections.abc import Sequence

import httpx

from pdserve.bench.client.client import build_headers
from pdserve.errors import ConfigError

_TIMEOUT_S = 10.0


def find_model(
    url: str, model: str | None, *, flag: str = "--model", transport: httpx.BaseTransport | None = None
) -> str:
    """The name to ask for.

    Args:
        url: the server's, without /v1.
        model: what the user wants; None = the first that is served.
        flag: the setting that named it, for the error.
        transport: stands for the network in tests.

    Raises:
        ConfigError: the server cannot be reached, does not list models, or does not serve this one.
    """
    names = _list_models(url, transport)
    if model is None:
        return names[0]
    if model not in names:
        raise ConfigError(f"{flag}: {url} does not serve {model!r}; it serves {', '.join(names)}")
    return model


def _list_models(url: str, transport: httpx.BaseTransport | None) -> Sequence[str]:
    try:
        with httpx.Client(timeout=_TIMEOUT_S, trust_env=False, transport=transport) as client:
            response = client.get(f"{url}/v1/models", headers=dict(build_headers()))
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"{url} cannot be reached: {reason}; is the server up?") from None
    if response.status_code != 200:
        raise ConfigError(f"{url}/v1/models answers with status {response.status_code}; is it an OpenAI API?")
    try:
        names = [str(entry["id"]) for entry in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{url}/v1/models does not list models as the OpenAI API does") from None
    if not names:
        raise ConfigError(f"{url} serves no model")
    return names
