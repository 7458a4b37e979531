"""Tool calls and reasoning through the whole application, whole and streamed, also with a hand-off within a tag."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import api_bench
import fake_instances
import httpx
import msgspec
import pytest
from api_bench import read_events, with_client
from fake_instances import FakeInstance

from pdserve.protocol import Role
from pdserve.router.api.answer_types import ChatChunk, ChatCompletion
from pdserve.text import ChatTemplate
from pdserve.text.message_format import MessageFormat, find_message_format

CHAT = "/v1/chat/completions"
EOS = 2
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} as <tool_call>{% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}{{ opening or '' }}"
)
ARGUMENTS = '{"city": "Paris"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'


@dataclass
class Streamed:
    """A streamed message put together as clients do."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    finish_reasons: list[str | None] = field(default_factory=list)
    num_logprobs: int = 0
    usage: Any = None

    def take(self, event: dict[str, Any]) -> None:
        self.usage = event["usage"]
        for choice in event["choices"]:
            delta = choice["delta"]
            self.content += delta.get("content", "")
            self.reasoning += delta.get("reasoning_content", "")
            self.finish_reasons.append(choice["finish_reason"])
            self.num_logprobs += len(choice["logprobs"]["content"]) if choice["logprobs"] else 0
            for part in delta.get("tool_calls", ()):
                if "id" in part:
                    assert part["index"] == len(self.calls)
                    self.calls[part["index"]] = {"id": part["id"], "name": part["function"]["name"], "arguments": ""}
                self.calls[part["index"]]["arguments"] += part["function"]["arguments"]


@pytest.fixture(autouse=True)
def tools_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ChatTemplate:
    tokenizer, _ = api_bench.load_text()
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    template = ChatTemplate(tmp_path, tokenizer)
    monkeypatch.setattr(api_bench, "load_text", lambda: (tokenizer, template))
    return template


def ask(
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    *,
    form: MessageFormat | None = None,
    status: int = 200,
    **fields: Any,
) -> httpx.Response:
    """The API's answer when the model writes ``answer`` and ends its turn."""
    tokenizer, template = api_bench.load_text()
    script = [*tokenizer.encode(answer, add_special_tokens=False), EOS]
    monkeypatch.setattr(fake_instances, "make_token", lambda prompt, seed, position: script[position])
    form = find_message_format("auto", "none", template.source) if form is None else form
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL], "stop_token_ids": [EOS], **fields}

    async def test(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(CHAT, json=body)

    prefill, decode = FakeInstance(Role.PREFILL, "p0"), FakeInstance(Role.DECODE, "d0")
    response: httpx.Response = with_client(test, prefill=[prefill], decode=[decode], message_format=form)
    assert response.status_code == status, response.text
    return response


def ask_whole(monkeypatch: pytest.MonkeyPatch, answer: str, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    body = ask(monkeypatch, answer, **options).json()
    msgspec.convert(body, ChatCompletion)
    (choice,) = body["choices"]
    return choice, body["usage"]


def ask_streamed(monkeypatch: pytest.MonkeyPatch, answer: str, **options: Any) -> Streamed:
    streamed = Streamed()
    options |= {"stream": True, "stream_options": {"include_usage": True}}
    for event in read_events(ask(monkeypatch, answer, **options).text):
        msgspec.convert(event, ChatChunk)
        streamed.take(event)
    return streamed


def count_tokens(text: str) -> int:
    return len(api_bench.load_text()[0].encode(text, add_special_tokens=False)) + 1


def test_case_38_first_token_within_the_tag_is_counted_once_and_the_call_is_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer, _ = api_bench.load_text()
    assert tokenizer.decode(tokenizer.encode(CALL)[:1]) in CALL.partition("_call>")[0], "the hand-off is within the tag"
    choice, usage = ask_whole(monkeypatch, CALL)
    (call,) = choice["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert call["id"].isalnum()
    assert choice["message"]["content"] is None
    assert choice["finish_reason"] == "tool_calls"
    assert usage["completion_tokens"] == count_tokens(CALL)
    streamed = ask_streamed(monkeypatch, CALL)
    (part,) = streamed.calls.values()
    assert (part["name"], part["arguments"]) == ("get_weather", ARGUMENTS)
    assert streamed.content == ""
    assert streamed.finish_reasons[-2:] == [None, "tool_calls"]
    assert streamed.usage == usage


def test_content_stands_beside_calls_and_ids_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'Look.\n<tool_call>{"name": "get_weather"}</tool_call>\n<tool_call>{"name": "get_weather"}</tool_call>'
    choice, _ = ask_whole(monkeypatch, text)
    assert choice["message"]["content"] == "Look."
    first, second = choice["message"]["tool_calls"]
    assert first["id"] != second["id"]
    streamed = ask_streamed(monkeypatch, text)
    assert streamed.content == "Look."
    assert [call["arguments"] for call in streamed.calls.values()] == ["{}", "{}"]


@pytest.mark.parametrize(
    "text",
    ["No call.", f"<tool_call>{{oops {ARGUMENTS}</tool_call>", CALL.replace("get_weather", "other"), "<tool_call"],
)
def test_what_is_no_call_is_content_and_ends_as_such(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    choice, usage = ask_whole(monkeypatch, text)
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert choice["finish_reason"] == "stop"
    streamed = ask_streamed(monkeypatch, text)
    assert (streamed.content, streamed.calls, streamed.finish_reasons[-1]) == (text, {}, "stop")
    assert streamed.usage == usage


@pytest.mark.parametrize("fields", [{"tools": None}, {"tools": []}, {"tool_choice": "none"}, {"form": MessageFormat()}])
def test_calls_are_looked_for_only_where_there_are_tools_and_a_format(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    choice, _ = ask_whole(monkeypatch, CALL, **fields)
    assert choice["message"]["content"] == CALL
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(("fields", "status"), [({}, 400), ({"tool_choice": "none"}, 200), ({"tools": None}, 200)])
def test_one_call_at_most_is_promised_only_where_that_can_be_kept(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], status: int
) -> None:
    answer = ask(monkeypatch, "Yes.", status=status, parallel_tool_calls=False, **fields)
    assert (status == 200) or answer.json()["error"]["param"] == "parallel_tool_calls"


def test_a_call_cut_by_the_token_limit_ends_with_length(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, _ = ask_whole(monkeypatch, CALL, max_tokens=count_tokens(CALL.partition(': "Paris')[0]))
    (call,) = choice["message"]["tool_calls"]
    assert ARGUMENTS.startswith(call["function"]["arguments"])
    assert choice["finish_reason"] == "length"


def test_every_token_has_its_logprobs_also_those_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    choice, usage = ask_whole(monkeypatch, CALL, logprobs=True)
    assert len(choice["logprobs"]["content"]) == usage["completion_tokens"]
    assert ask_streamed(monkeypatch, CALL, logprobs=True).num_logprobs == usage["completion_tokens"]


def test_a_special_token_is_read_as_a_tag_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2 has no such token, so one of its own stands for it."""
    tokenizer, _ = api_bench.load_text()
    special = "<|im_start|>"
    form = MessageFormat(tool_calls=find_message_format("hermes", "none", "").tool_calls)
    assert form.tool_calls is not None
    form = MessageFormat(type(form.tool_calls)(special, "</tool_call>"))
    token_id = tokenizer.token_to_id(special)
    script = tokenizer.encode(CALL.removeprefix("<tool_call>"), add_special_tokens=False)
    assert token_id is not None
    monkeypatch.setattr(type(tokenizer), "encode", lambda *_, **__: [token_id, *script])
    choice, _ = ask_whole(monkeypatch, "", form=form)
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert json.dumps(choice).count(special) == 0


@pytest.mark.parametrize(("opening", "text"), [("", "<think>\nHm.</think>\n\nYes."), ("<think>\n", "Hm.</think>Yes.")])
def test_reasoning_is_told_apart(monkeypatch: pytest.MonkeyPatch, opening: str, text: str) -> None:
    form = find_message_format("none", "think", "")
    options: dict[str, Any] = {"form": form, "tools": None, "chat_template_kwargs": {"opening": opening}}
    choice, usage = ask_whole(monkeypatch, text, **options)
    assert choice["message"]["reasoning_content"] == "Hm."
    assert choice["message"]["content"] == "Yes."
    streamed = ask_streamed(monkeypatch, text, **options)
    assert (streamed.reasoning, streamed.content, streamed.usage) == ("Hm.", "Yes.", usage)
