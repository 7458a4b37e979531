"""The clients that people use: the openai package and curl."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from target import CHAT, COMPLETIONS, TIMEOUT_S, Target, read_events

MESSAGES: Any = [{"role": "user", "content": "Tell me about rivers."}]


@pytest.fixture(scope="module")
def client(target: Target) -> Iterator[openai.OpenAI]:
    with target.build_openai() as client:
        yield client


def test_openai_lists_the_model(target: Target, client: openai.OpenAI) -> None:
    assert target.model in [model.id for model in client.models.list()]


def test_openai_completes(target: Target, client: openai.OpenAI) -> None:
    with target.skipping():
        answer = client.completions.create(model=target.model, prompt="Once upon", max_tokens=4, logprobs=2, seed=1)
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert answer.usage is not None
    assert len(choice.logprobs.tokens) == answer.usage.completion_tokens


def test_openai_chats_whole_and_streamed(target: Target, client: openai.OpenAI) -> None:
    target.need(CHAT)
    fields: dict[str, Any] = {"model": target.model, "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    content, finish_reason, usage = "", None, None
    for chunk in client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            finish_reason = choice.finish_reason
        usage = chunk.usage
    assert content == whole.choices[0].message.content
    assert finish_reason == whole.choices[0].finish_reason
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


def test_openai_raises_its_own_errors(target: Target, client: openai.OpenAI) -> None:
    wrong: Any = "many"
    with pytest.raises((openai.BadRequestError, openai.UnprocessableEntityError)):
        client.completions.create(model=target.model, prompt="Hi", max_tokens=wrong)
    with pytest.raises((openai.NotFoundError, openai.BadRequestError)):
        client.completions.create(model="no-such-model", prompt="Hi")


def curl(target: Target, path: str, body: dict[str, Any], *options: str) -> subprocess.CompletedProcess[str]:
    target.need(path)
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = ["curl", "--silent", "--show-error", "--max-time", str(TIMEOUT_S), *options, "--data", "@-"]
    command += ["--header", "content-type: application/json", "--header", f"authorization: Bearer {target.key}"]
    text = json.dumps({"model": target.model, **body})
    return subprocess.run(
        [*command, target.url + path], input=text, capture_output=True, text=True, timeout=2 * TIMEOUT_S
    )


def test_curl_gets_an_answer(target: Target) -> None:
    done = curl(target, COMPLETIONS, {"prompt": "Once upon", "max_tokens": 3})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["object"] == "text_completion"


def test_curl_gets_a_stream_and_its_end(target: Target) -> None:
    done = curl(target, CHAT, {"messages": MESSAGES, "max_tokens": 3, "stream": True}, "--no-buffer")
    assert done.returncode == 0, done.stderr
    assert read_events(done.stdout)


def test_curl_sends_a_long_body_that_it_announces_first(target: Target) -> None:
    messages = [{"role": "user", "content": "river " * 300}]
    done = curl(target, CHAT, {"messages": messages, "max_tokens": 2}, "--header", "expect: 100-continue")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["usage"]["prompt_tokens"] > 300


def test_curl_fails_where_it_is_refused(target: Target) -> None:
    done = curl(target, COMPLETIONS, {"prompt": "Hi", "max_tokens": -1}, "--fail")
    assert done.returncode == 22
