"""Answers of a form that the client asks for, and calls that must come, as the openai package reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ConfigDict, Field
from target import CHAT, COMPLETIONS, Target, get_text

MESSAGES: Any = [{"role": "user", "content": "Ann is 25 years old and likes rivers. Describe her in JSON."}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "get_time",
            "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
        },
    },
]
ASK_FOR_CALL: Any = [{"role": "user", "content": "What is the weather in Rome?"}]


class Person(BaseModel):
    """What the openai package makes a schema of."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=10)
    mood: Literal["glad", "sad"]


@pytest.fixture(scope="module")
def client(target: Target) -> Iterator[openai.OpenAI]:
    with target.build_openai() as client:
        yield client


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_answer_follows_the_schema(target: Target, path: str, stream: bool) -> None:
    target.need(path)
    fields = {"messages": MESSAGES} if path == CHAT else {"prompt": MESSAGES[0]["content"]}
    answer = target.ask(
        path, {**fields, "response_format": JSON_FORMAT, "max_tokens": 80, "temperature": 0, "stream": stream}
    )
    (choice,) = answer["choices"].values() if stream else answer["choices"]
    assert choice["finish_reason"] == "stop"
    Draft202012Validator(SCHEMA).validate(json.loads(get_text(choice)))


def test_any_object(target: Target) -> None:
    body = {"messages": MESSAGES, "response_format": {"type": "json_object"}, "max_tokens": 40, "seed": 3}
    (choice,) = target.ask(CHAT, body)["choices"]
    assert get_text(choice).startswith("{")
    if choice["finish_reason"] == "stop":
        assert isinstance(json.loads(get_text(choice)), dict)


def test_the_token_limit_cuts_an_answer_as_ever(target: Target) -> None:
    body = {"messages": MESSAGES, "response_format": JSON_FORMAT, "max_tokens": 3, "temperature": 0}
    answer = target.ask(CHAT, body)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 3


def test_one_of_several_texts(target: Target) -> None:
    body = {"messages": MESSAGES, "structured_outputs": {"choice": ["yes", "no"]}, "seed": 1, "max_tokens": 10}
    (choice,) = target.ask(CHAT, body)["choices"]
    if target.deployment is None and get_text(choice) not in ("yes", "no"):
        pytest.skip("structured_outputs are not known here, and ignored")
    assert get_text(choice) in ("yes", "no")
    assert choice["finish_reason"] == "stop"


def test_openai_parses_an_answer_into_a_model(target: Target, client: openai.OpenAI) -> None:
    target.need(CHAT)
    with target.skipping():
        answer = client.chat.completions.parse(
            model=target.model, messages=MESSAGES, response_format=Person, max_tokens=80, temperature=0
        )
    person = answer.choices[0].message.parsed
    assert person is not None
    assert person.mood in ("glad", "sad")


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "get_time"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
    ],
    ids=["required", "named"],
)
def test_openai_gets_a_call_that_must_come(target: Target, client: openai.OpenAI, choice: Any, names: set[str]) -> None:
    target.need(CHAT)
    fields: dict[str, Any] = {"model": target.model, "messages": ASK_FOR_CALL, "tools": TOOLS, "tool_choice": choice}
    fields |= {"max_tokens": 60, "temperature": 0}
    with target.skipping():
        answer = client.chat.completions.create(**fields)
    (one,) = answer.choices
    calls = one.message.tool_calls or []
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    assert calls
    assert not one.message.content
    whole = [call for call in calls if call.type == "function"]
    assert {call.function.name for call in whole} <= names
    # The limit may cut the last one.
    for call in whole[: -1 if one.finish_reason == "length" else None]:
        Draft202012Validator(schemas[call.function.name]).validate(json.loads(call.function.arguments))
    arguments: dict[int, str] = {}
    for chunk in client.chat.completions.create(**fields, stream=True):
        for part in chunk.choices[0].delta.tool_calls or () if chunk.choices else ():
            assert part.function is not None
            arguments[part.index] = arguments.get(part.index, "") + (part.function.arguments or "")
    assert list(arguments.values()) == [call.function.arguments for call in whole]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}},
        {"response_format": {"type": "nothing of the kind"}},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nobody"}}},
        {"tool_choice": "required"},
    ],
)
def test_what_cannot_be_followed_is_refused(target: Target, fields: dict[str, Any]) -> None:
    target.need(CHAT)
    response = target.post(CHAT, {"messages": MESSAGES, "max_tokens": 5, **fields})
    if target.deployment is None and response.status_code == 200:
        pytest.skip("taken or ignored here")
    assert 400 <= response.status_code < 500, response.text


def test_what_only_an_engine_can_tell_is_refused_by_name_and_hurts_nobody(target: Target) -> None:
    """Ours: nothing satisfies a schema that is only itself, which shows where tokens are known."""
    if target.deployment is None:
        pytest.skip("others may see it differently")
    endless = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}}
    for _ in range(5):
        response = target.post(CHAT, {"messages": MESSAGES, "response_format": endless})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "response_format"
    assert target.ask(COMPLETIONS, {"prompt": "Hi", "max_tokens": 2})["usage"]["completion_tokens"] >= 1
