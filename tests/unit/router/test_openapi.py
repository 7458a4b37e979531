"""The OpenAPI document is valid, names every route, and means what it says, for what comes and for what goes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import httpx
import pytest
from api_bench import MODEL, read_events, with_client
from fake_instances import ENGINE_ERROR, OVERLOADED, FakeInstance, Fault
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator

from pdserve.protocol import Role
from pdserve.router.api.openapi import OPERATIONS
from pdserve.router.api.request_types import (
    ChatFields,
    CompletionFields,
    DetokenizeFields,
    TokenizeFields,
    get_unsupported,
)

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
MESSAGES = [{"role": "user", "content": "Hi"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
KINDS = {COMPLETIONS: CompletionFields, CHAT: ChatFields, TOKENIZE: TokenizeFields, DETOKENIZE: DetokenizeFields}
REQUIRED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hi"},
    CHAT: {"messages": MESSAGES},
    TOKENIZE: {"prompt": "Hi"},
    DETOKENIZE: {"tokens": [5]},
}
GENERATION: dict[str, list[Any]] = {
    "model": [MODEL],
    "max_tokens": [1, 20],
    "temperature": [0, 2, 0.5],
    "top_p": [0.1, 1],
    "n": [1, 8],
    "stream": [False, True],
    "stop": ["x", "x" * 1024, [], ["a", "b", "c", "d"]],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "logit_bias": [{}, {"5": -100, "6": 100}],
    "seed": [-(2**63), 2**63 - 1],
    "user": ["somebody"],
    "top_k": [-1, 0, 5],
    "min_p": [0, 1],
    "repetition_penalty": [0.1, 3],
    "min_tokens": [0, 5],
    "ignore_eos": [True],
    "stop_token_ids": [[], [5] * 128],
    "include_stop_str_in_output": [True],
    "skip_special_tokens": [False],
    "prompt_logprobs": [0, 5],
    "priority": [-(2**63), 2**63 - 1],
    "cache_salt": ["x", "x" * 256],
    "add_special_tokens": [False],
    "timeout": [0.5, 100],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "integer"}}},
    ],
    "structured_outputs": [
        {"json": {"type": "string"}},
        {"json": "{}"},
        {"json_object": True},
        {"regex": "a+"},
        {"choice": ["yes", "no"]},
        {"grammar": 'start: "a"'},
    ],
}
TEMPLATE: dict[str, list[Any]] = {
    "messages": [MESSAGES, PARTS],
    "add_generation_prompt": [False],
    "continue_final_message": [True],
    "chat_template_kwargs": [{"enable_thinking": False}],
    "tools": [[]],
    "tool_choice": ["none"],
}
ACCEPTED: dict[str, dict[str, list[Any]]] = {
    COMPLETIONS: {
        **GENERATION,
        "prompt": ["Hi", ["Hi", "you"], [5, 6], [[5], [6, 7]]],
        "logprobs": [0, 5],
        "echo": [True],
        "best_of": [1, 8],
    },
    CHAT: {**GENERATION, **TEMPLATE, "max_completion_tokens": [1, 20], "logprobs": [True, False]},
    TOKENIZE: {"model": [MODEL], "prompt": ["", "Hi"], "add_special_tokens": [False]},
    DETOKENIZE: {"model": [MODEL], "tokens": [[], [5, 6]]},
}
BESIDE_OTHERS: dict[str, list[dict[str, Any]]] = {
    COMPLETIONS: [{"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": False}}],
    CHAT: [
        {"stream": True, "stream_options": {"include_usage": True}},
        {"logprobs": True, "top_logprobs": 20},
        {"logprobs": True, "top_logprobs": 0},
    ],
    TOKENIZE: [{"prompt": None, name: value, **({} if name == "messages" else {"messages": MESSAGES})}
               for name, values in TEMPLATE.items() for value in values],
    DETOKENIZE: [],
}  # fmt: skip
"""Fields that have a meaning only beside another one."""


def with_decode(test: Any, decode: FakeInstance | None = None) -> Any:
    read_document()  # has an event loop of its own
    return with_client(test, decode=[decode or FakeInstance(Role.DECODE, "d0")])


@cache
def read_document() -> dict[str, Any]:
    async def test(client: httpx.AsyncClient) -> dict[str, Any]:
        document: dict[str, Any] = (await client.get("/openapi.json")).json()
        return document

    document: dict[str, Any] = with_client(test, decode=[FakeInstance(Role.DECODE, "d0")])
    return document


def build_validator(schema: dict[str, Any], *, is_closed: bool = False) -> Draft202012Validator:
    """Of a schema in the document; a closed one takes no field that is not named."""
    components = copy.deepcopy(read_document()["components"])
    for component in components["schemas"].values() if is_closed else ():
        component["additionalProperties"] = False
    return Draft202012Validator({**schema, "components": components})


def schema_of_body(path: str) -> dict[str, Any]:
    schema: dict[str, Any] = read_document()["paths"][path]["post"]["requestBody"]["content"]["application/json"][
        "schema"
    ]
    return schema


def properties_of(path: str) -> dict[str, Any]:
    name = schema_of_body(path)["$ref"].rpartition("/")[2]
    properties: dict[str, Any] = read_document()["components"]["schemas"][name]["properties"]
    return properties


def test_document_is_valid() -> None:
    OpenAPIV31SpecValidator(read_document()).validate()


def test_every_route_is_described_and_nothing_else() -> None:
    found = {(method, path) for path, methods in read_document()["paths"].items() for method in methods}
    assert found == set(OPERATIONS)


@pytest.mark.parametrize("path", ACCEPTED)
def test_every_documented_field_is_accepted_as_documented(path: str) -> None:
    documented = properties_of(path)
    bodies = [{field: value} for field, values in ACCEPTED[path].items() for value in values] + BESIDE_OTHERS[path]
    unsupported = get_unsupported(KINDS[path])
    bodies += [{field: value} for field, values in unsupported.items() for value in values]
    bodies += [{field: None} for field in documented if field not in REQUIRED[path]]
    assert {field for body in bodies for field in body} == set(documented)
    validator = build_validator(schema_of_body(path))

    async def test(client: httpx.AsyncClient) -> None:
        for fields in bodies:
            body = {**REQUIRED[path], "max_tokens": 6, **fields}
            validator.validate(body)
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, (fields, answer.text)

    with_decode(test)


def values_outside(field: str, schema: dict[str, Any]) -> Iterator[Any]:
    """Values beyond each bound of a field, and of a type that it does not have."""
    leaves = schema.get("anyOf", [schema])
    for leaf in leaves:
        if "minimum" in leaf:
            yield leaf["minimum"] - (1 if leaf["type"] == "integer" else 0.001)
        if "exclusiveMinimum" in leaf:
            yield leaf["exclusiveMinimum"]
        if "maximum" in leaf:
            yield leaf["maximum"] + (1 if leaf["type"] == "integer" else 0.001)
        if leaf.get("minLength"):
            yield ""
        if "maxLength" in leaf:
            yield "x" * (leaf["maxLength"] + 1)
        if leaf.get("minItems"):
            yield []
        if "maxItems" in leaf:
            yield [5 if leaf["items"]["type"] == "integer" else "x"] * (leaf["maxItems"] + 1)
    if not any("anyOf" in leaf or "enum" in leaf for leaf in leaves):
        yield 5 if any(leaf.get("type") == "object" for leaf in leaves) else {"a": 1}


@pytest.mark.parametrize("path", ACCEPTED)
def test_what_the_document_excludes_is_refused_and_the_field_named(path: str) -> None:
    cases = [
        (field, value)
        for field, schema in properties_of(path).items()
        for value in ([{"x": 1}] if field in get_unsupported(KINDS[path]) else values_outside(field, schema))
        if field != "stream_options"
    ]
    validator = build_validator(schema_of_body(path))

    async def test(client: httpx.AsyncClient) -> None:
        for field, value in cases:
            body = {**REQUIRED[path], field: value}
            assert not validator.is_valid(body), (field, value)
            answer = await client.post(path, json=body)
            assert answer.status_code == 400, (field, value, answer.text)
            assert answer.json()["error"]["param"] == field

    with_decode(test)
    assert len(cases) >= len(properties_of(path)) - 1


ANSWERED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": [5, 6, 7]}),
    (COMPLETIONS, {"prompt": "Hi", "logprobs": 2, "n": 2}),
    (COMPLETIONS, {"prompt": "Hi", "prompt_logprobs": 1, "stop_token_ids": list(range(1000, 1100))}),
    (CHAT, {"messages": MESSAGES}),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 1, "n": 2}),
    (TOKENIZE, {"messages": MESSAGES}),
    (DETOKENIZE, {"tokens": [1000]}),
]


def validate_answer(method: str, path: str, answer: httpx.Response) -> None:
    responses = read_document()["paths"][path][method]["responses"]
    assert str(answer.status_code) in responses, (path, answer.text)
    described = responses[str(answer.status_code)]["content"]
    media_type = answer.headers["content-type"].partition(";")[0]
    schema = described[media_type]["schema"]
    if media_type == "application/json":
        build_validator(schema, is_closed=True).validate(answer.json())
    elif media_type == "text/event-stream":
        validator = build_validator(schema["x-event-schema"], is_closed=True)
        for event in read_events(answer.text):
            validator.validate(event)


def test_answers_are_as_documented() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        for path, fields in ANSWERED:
            answer = await client.post(path, json=fields)
            assert answer.status_code == 200
            validate_answer("post", path, answer)
            if path in (COMPLETIONS, CHAT) and "prompt_logprobs" not in fields:
                body = {**fields, "stream": True, "stream_options": {"include_usage": True}}
                validate_answer("post", path, await client.post(path, json=body))
        for path in ("/v1/models", "/", "/health", "/ready", "/metrics"):
            validate_answer("get", path, await client.get(path))
        validate_answer("get", "/v1/models/{name}", await client.get(f"/v1/models/{MODEL}"))
        validate_answer("get", "/v1/models/{name}", await client.get("/v1/models/other"))

    with_decode(test)


def test_errors_are_as_documented_also_in_streams() -> None:
    async def test(client: httpx.AsyncClient) -> None:
        answers = [await client.post(COMPLETIONS, json={"prompt": "Hi"})]
        answers.append(await client.post(COMPLETIONS, json={"prompt": ""}))
        answers.append(await client.post(COMPLETIONS, json={"prompt": "x" * 30_000}))
        answers.append(await client.post(COMPLETIONS, json={"prompt": "x", "model": "other"}))
        assert [answer.status_code for answer in answers] == [429, 400, 413, 404]
        for answer in answers:
            validate_answer("post", COMPLETIONS, answer)
        validate_answer("post", COMPLETIONS, await client.post(COMPLETIONS, json={"prompt": "x", "stream": True}))

    late = Fault(error=ENGINE_ERROR, error_after_tokens=2)
    with_decode(test, FakeInstance(Role.DECODE, "d0", [Fault(error=OVERLOADED), late, late, late]))
