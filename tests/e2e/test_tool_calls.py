"""A tool call through real processes, read by the openai package: the hand-off lies within the call's tag."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from replay_service import MODEL, Service

from pdserve.checkpoint import prepare_tokenizer, resolve_model
from pdserve.text import Tokenizer

EOS = 2
ARGUMENTS = '{"city": "Paris", "days": [1, 2]}'
ANSWER = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }} is called as <tool_call>…</tool_call>\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
)
FIELDS: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
    "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}],
    "max_tokens": 200,
    "extra_body": {"stop_token_ids": [EOS]},
}


@pytest.fixture(scope="module")
def script(tokenizer: Tokenizer) -> list[int]:
    return [*tokenizer.encode(ANSWER, add_special_tokens=False), EOS]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, script: list[int]) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("tools")
    model = directory / "model"
    shutil.copytree(prepare_tokenizer(resolve_model(MODEL)), model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    made = Service(directory)
    try:
        for role in ("prefill", "decode"):
            made.add(role, "--script", json.dumps(script))
        yield made.start("--model", str(model), "--served-model-name", MODEL).wait_for(1, 1)
    finally:
        made.close()


def test_case_38_a_call_is_whole_and_its_tokens_are_counted_once(
    service: Service, script: list[int], tokenizer: Tokenizer
) -> None:
    assert ANSWER.startswith(tokenizer.decode(script[:1]))
    assert len(tokenizer.decode(script[:1])) < len("<tool_call>"), "the hand-off is within the tag"
    answer = service.client.chat.completions.create(**FIELDS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(script)
    assert service.instances[1].stats["with_kv"] == 1


def test_a_streamed_call_comes_in_fragments_that_make_the_whole_one(service: Service, script: list[int]) -> None:
    names, fragments, finish_reasons, usage = [], [], [], None
    stream = service.client.chat.completions.create(**FIELDS, stream=True, stream_options={"include_usage": True})
    for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            assert not choice.delta.content
            finish_reasons.append(choice.finish_reason)
            for part in choice.delta.tool_calls or ():
                assert part.function is not None
                names += [part.function.name] if part.id else []
                fragments.append(part.function.arguments or "")
    assert names == ["get_weather"]
    assert "".join(fragments) == ARGUMENTS
    assert len(fragments) > 5
    assert finish_reasons[-1] == "tool_calls"
    assert usage is not None
    assert usage.completion_tokens == len(script)
