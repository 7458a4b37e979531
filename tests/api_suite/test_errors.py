"""What a client does wrong is a 4xx with a reason, never a 500, and hurts nobody behind it: cases 28 and 32."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from target import CHAT, COMPLETIONS, Target

MESSAGES = [{"role": "user", "content": "Hi"}]
TOO_LONG = [5] * 300_000
WRONG: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "Hi", "max_tokens": -1}),
    (COMPLETIONS, {"prompt": "Hi", "max_tokens": "many"}),
    (COMPLETIONS, {"prompt": "Hi", "temperature": "hot"}),
    (COMPLETIONS, {"prompt": "Hi", "temperature": -1}),
    (COMPLETIONS, {"prompt": "Hi", "top_p": 2}),
    (COMPLETIONS, {"prompt": "Hi", "n": 0}),
    (COMPLETIONS, {"prompt": "Hi", "stop_token_ids": ["a"]}),
    (COMPLETIONS, {"prompt": "Hi", "logit_bias": {"abc": 1}}),
    (COMPLETIONS, {"prompt": "Hi", "max_tokens": 10**7}),
    (COMPLETIONS, {"prompt": [10**9]}),
    (COMPLETIONS, {"prompt": {"text": "Hi"}}),
    (COMPLETIONS, {"prompt": TOO_LONG}),
    (COMPLETIONS, {}),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": "Hi"}),
    (CHAT, {"messages": [{"content": "Hi"}]}),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 99, "logprobs": True}),
    (CHAT, {"messages": MESSAGES, "max_completion_tokens": -5}),
    (CHAT, {"messages": MESSAGES, "stream": "yes please"}),
    (CHAT, {}),
    (COMPLETIONS, {"model": "no-such-model", "prompt": "Hi"}),
    (CHAT, {"model": "no-such-model", "messages": MESSAGES}),
]


def check_refused(response: httpx.Response) -> None:
    assert 400 <= response.status_code < 500, response.text
    body = response.json()
    assert body.get("error") or body.get("message") or body.get("detail")
    assert "Traceback" not in response.text


@pytest.mark.parametrize(("path", "body"), WRONG, ids=lambda value: str(value)[:60])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_case_32_wrong_requests_are_refused_with_the_reason(
    target: Target, path: str, body: dict[str, Any], stream: bool
) -> None:
    target.need(path)
    check_refused(target.post(path, {"stream": stream, **body}))


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b"[" * 5000])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_bodies_that_are_no_object_are_refused(target: Target, path: str, body: bytes) -> None:
    target.need(path)
    check_refused(target.client.post(target.url + path, content=body, headers={"content-type": "application/json"}))


def test_unknown_paths_are_404(target: Target) -> None:
    assert target.client.get(f"{target.url}/v1/nothing").status_code == 404


def test_case_28_refused_requests_put_no_instance_aside(target: Target) -> None:
    for _ in range(10):
        check_refused(target.post(COMPLETIONS, {"prompt": TOO_LONG}))
    assert target.ask(COMPLETIONS, {"prompt": "Hi", "max_tokens": 2})["usage"]["completion_tokens"] >= 1


def test_unsupported_fields_are_named(target: Target) -> None:
    """Ours: what would change the answer and is not done is refused by name."""
    if target.deployment is None:
        pytest.skip("others may support them")
    for name, value in {
        "functions": [{"name": "f"}],
        "modalities": ["audio"],
        "reasoning_effort": "high",
    }.items():
        response = target.post(CHAT, {"messages": MESSAGES, name: value})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == name
