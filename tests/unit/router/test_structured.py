"""What a client asks of an answer's form becomes one grammar, the same for both legs, with the client's field named."""

from __future__ import annotations

import json
from typing import Any

import api_bench
import httpx
import pytest
from api_bench import with_client
from fake_instances import FakeInstance, Fault

from pdserve.protocol import GrammarKind, GrammarSpec, Role, WireError
from pdserve.text.message_format import MessageFormat, find_message_format

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "g"}},
]
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def post(
    path: str, body: dict[str, Any], prefill: FakeInstance, decode: FakeInstance, **options: Any
) -> httpx.Response:
    async def test(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(path, json=body)

    answer: httpx.Response = with_client(test, prefill=[prefill], decode=[decode], **options)
    return answer


def find_grammar(path: str, fields: dict[str, Any], **options: Any) -> GrammarSpec | None:
    """The grammar that both legs get."""
    prefill, decode = FakeInstance(Role.PREFILL, "p0"), FakeInstance(Role.DECODE, "d0")
    body = {"prompt": "Hi"} if path == COMPLETIONS else {"messages": MESSAGES}
    answer = post(path, {"max_tokens": 3, **body, **fields}, prefill, decode, **options)
    assert answer.status_code == 200, answer.text
    (first,), (second,) = prefill.messages, decode.messages
    assert first.sampling == second.sampling
    return first.sampling.grammar


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"response_format": JSON_FORMAT}, GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
        ({"response_format": {"type": "json_object"}}, GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
        ({"structured_outputs": {"json_object": True}}, GrammarKind.JSON_SCHEMA, '{"type": "object"}'),
        ({"structured_outputs": {"json": SCHEMA}}, GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)),
        ({"structured_outputs": {"regex": "a+"}}, GrammarKind.REGEX, "a+"),
        ({"structured_outputs": {"choice": ["yes", 'n"ö']}}, GrammarKind.LARK, 'start: "yes" | "n\\"ö"'),
        ({"structured_outputs": {"grammar": 'start: "x"'}}, GrammarKind.LARK, 'start: "x"'),
    ],
)
def test_fields_become_a_grammar_for_both_legs(path: str, fields: dict[str, Any], kind: GrammarKind, text: str) -> None:
    assert find_grammar(path, fields) == GrammarSpec(kind, text)


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "text"}}, {"response_format": None}])
def test_who_asks_for_nothing_gets_none(fields: dict[str, Any]) -> None:
    assert find_grammar(COMPLETIONS, fields) is None


@pytest.mark.parametrize(
    ("choice", "is_parallel", "is_single", "names"),
    [
        ("required", None, False, {"f", "g"}),
        ("required", True, False, {"f", "g"}),
        ("required", False, True, {"f", "g"}),
        ({"type": "function", "function": {"name": "g"}}, None, True, {"g"}),
    ],
)
def test_calls_that_must_come_are_a_grammar_also_where_the_template_shows_no_tools(
    choice: Any, is_parallel: bool | None, is_single: bool, names: set[str]
) -> None:
    grammar = find_grammar(CHAT, {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": is_parallel})
    assert grammar is not None
    assert grammar.kind is GrammarKind.LARK
    assert {name for name in ("f", "g") if json.dumps(f'{{"name": "{name}"')[1:-1] in grammar.text} == names
    assert ("call){0,15}" in grammar.text) is not is_single
    assert "<tool_call>" in grammar.text


def test_a_model_that_shows_its_own_way_of_calls_is_held_to_it() -> None:
    form = find_message_format("llama3_json", "none", "")
    grammar = find_grammar(CHAT, {"tools": TOOLS, "tool_choice": "required"}, message_format=form)
    assert grammar is not None
    assert "parameters" in grammar.text
    assert "<tool_call>" not in grammar.text


def test_a_forced_call_goes_before_the_format_of_a_content_that_cannot_come() -> None:
    fields = {"tools": TOOLS, "tool_choice": "required"}
    assert find_grammar(CHAT, {**fields, "response_format": JSON_FORMAT}) == find_grammar(CHAT, fields)


def test_with_tools_at_choice_the_answer_is_of_the_format_or_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    _, template = api_bench.load_text()
    monkeypatch.setattr(template, "takes_tools", True)
    form = find_message_format("hermes", "none", "")
    fields: dict[str, Any] = {"tools": TOOLS, "response_format": JSON_FORMAT}
    grammar = find_grammar(CHAT, fields, message_format=form)
    assert grammar is not None
    assert grammar.text.startswith("start: calls | content\n")
    for less in ({**fields, "tool_choice": "none"}, {"response_format": JSON_FORMAT}):
        assert find_grammar(CHAT, less, message_format=form) == GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
    assert find_grammar(CHAT, fields, message_format=MessageFormat()) == GrammarSpec(
        GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA)
    )
    prefill, decode = FakeInstance(Role.PREFILL, "p0"), FakeInstance(Role.DECODE, "d0")
    body = {"messages": MESSAGES, "tools": TOOLS, "structured_outputs": {"regex": "a"}}
    answer = post(CHAT, body, prefill, decode, message_format=form)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "structured_outputs"


def test_an_answer_with_a_grammar_has_no_reasoning() -> None:
    form = find_message_format("none", "think", "")
    tokenizer, _ = api_bench.load_text()
    reader = form.build_reader(frozenset(), tokenizer.encode("<think>"), tokenizer, has_grammar=True)
    assert reader.push('{"a": 1}').content == '{"a": 1}'


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"response_format": JSON_FORMAT}, "response_format"),
        (CHAT, {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (CHAT, {"tools": TOOLS, "tool_choice": "required"}, "tools"),
    ],
)
def test_what_only_an_engine_can_tell_names_the_clients_field_and_is_not_retried(
    path: str, fields: dict[str, Any], param: str
) -> None:
    error = WireError(code="invalid_value", message="the grammar cannot be followed", http_status=400, param="grammar")
    prefill, decode = FakeInstance(Role.PREFILL, "p0", [Fault(error=error)]), FakeInstance(Role.DECODE, "d0")
    body = {"prompt": "Hi"} if path == COMPLETIONS else {"messages": MESSAGES}
    answer = post(path, {**body, **fields}, prefill, decode)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not decode.messages
