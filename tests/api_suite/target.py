"""A service with OpenAI's API: asking it, joining its streams, and comparing what it answers."""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

if TYPE_CHECKING:
    from processes import Deployment

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SMALLEST: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hi"},
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
}
TIMEOUT_S = 120.0
NOT_OFFERED = (400, 404, 405, 415, 422, 501)
"""How services say that they do not take a field or do not have an endpoint."""


class Target:
    """One service, and perhaps one engine alone as its reference.

    Args:
        url: of the service, without ``/v1``.
        reference_url: of the reference.
        model: its name; None = the first that is listed.
        key: the API key.
        deployment: our own processes behind it; None for another service.
    """

    def __init__(
        self, url: str, reference_url: str | None, *, model: str | None, key: str, deployment: Deployment | None = None
    ) -> None:
        self.urls = {"service": url.rstrip("/").removesuffix("/v1")}
        if reference_url is not None:
            self.urls["reference"] = reference_url.rstrip("/").removesuffix("/v1")
        self.deployment = deployment
        self.key = key
        self.client = httpx.Client(timeout=TIMEOUT_S, headers={"authorization": f"Bearer {key}"})
        self._model = model
        self._offered: dict[str, int] = {}

    def __enter__(self) -> Target:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    @property
    def url(self) -> str:
        return self.urls["service"]

    @cached_property
    def model(self) -> str:
        return self._model or str(self.client.get(f"{self.url}/v1/models").json()["data"][0]["id"])

    def build_openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, max_retries=0, timeout=TIMEOUT_S)

    def post(self, path: str, body: Any, way: str = "service") -> httpx.Response:
        """Any answer; ``model`` is added."""
        return self.client.post(self.urls[way] + path, json={"model": self.model, **body})

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer, joined if it was streamed; skips what another service does not offer."""
        return self.read(self.post(path, body))

    def need(self, path: str) -> None:
        """Skip where another service does not have this endpoint."""
        if path not in self._offered:
            self._offered[path] = self.post(path, {**SMALLEST[path], "max_tokens": 1}).status_code
        if self.deployment is None and self._offered[path] in NOT_OFFERED:
            pytest.skip(f"not offered: {path} answers {self._offered[path]}")

    @contextlib.contextmanager
    def skipping(self) -> Iterator[None]:
        """Skip where the openai package says that another service refused a field."""
        try:
            yield
        except openai.APIStatusError as error:
            if self.deployment is not None or error.status_code not in NOT_OFFERED:
                raise
            pytest.skip(f"not offered: {error}")

    def read(self, response: httpx.Response) -> dict[str, Any]:
        """An answer's object, joined if it was streamed, without what differs from one to the next.

        Skips where another service refused the request.
        """
        if self.deployment is None and response.status_code in NOT_OFFERED:
            pytest.skip(f"not offered: {response.status_code} {response.text[:300]}")
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = join_stream(response.text) if is_stream(response) else response.json()
        assert answer.pop("id")
        assert answer.pop("created")
        for choice in answer["choices"] if isinstance(answer["choices"], list) else ():
            for call in choice.get("message", {}).get("tool_calls") or ():
                assert call.pop("id")
        return answer

    def wait_idle(self) -> None:
        """Until our own instances hold no block; nobody can tell of another service."""
        if self.deployment is not None:
            self.deployment.wait_idle()


def is_stream(response: httpx.Response) -> bool:
    return response.headers["content-type"].startswith("text/event-stream")


def unique_text() -> str:
    """A prompt that no cache has seen."""
    return f"Story {uuid.uuid4().hex}: " + "the old house stood on a hill above the river, and every evening " * 4


def read_events(text: str) -> list[dict[str, Any]]:
    """A stream's events; they end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.replace("\r\n", "\n").split("\n\n") if line.strip()]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines if not line.startswith(":")]


def join_stream(text: str) -> dict[str, Any]:
    """A streamed answer as one object: text and logprobs of each choice joined, the last of all else."""
    answer: dict[str, Any] = {"choices": {}}
    for event in read_events(text):
        for choice in event.pop("choices"):
            joined = answer["choices"].setdefault(choice["index"], {"text": "", "logprobs": [], "roles": []})
            delta = choice.get("delta", {})
            joined["text"] += choice.get("text", delta.get("content") or "")
            joined["roles"] += [delta["role"]] if delta.get("role") else []
            joined["logprobs"] += [choice["logprobs"]] if choice.get("logprobs") else []
            joined["finish_reason"], joined["stop_reason"] = choice["finish_reason"], choice.get("stop_reason")
        answer |= event
    return answer


def get_text(choice: dict[str, Any]) -> str:
    """Of a choice of any kind of answer."""
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def find_differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Where two answers differ, as paths with both values."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}, key=str):
            yield from find_differences(one.get(key), other.get(key), f"{path}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for index, pair in enumerate(zip(one, other, strict=True)):
            yield from find_differences(*pair, f"{path}[{index}]")
    elif one != other:
        yield f"{path}: {one!r} and {other!r}"
