"""Answers that follow a grammar, with the real model: valid where they end by themselves, and everywhere the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pd_pair import Alone, Answer, PDPair

from pdserve.protocol import AddRequest, FinishReason, GrammarKind, GrammarSpec, RequestOutput, SamplingParams
from pdserve.text import Tokenizer

EOS = 2
TEXT = {"type": "string", "maxLength": 12}
SCHEMAS: list[dict[str, Any]] = [
    {"type": "string", "maxLength": 20},
    {"type": "string", "pattern": "^[A-Z][a-z]{2,8}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "minLength": 3, "maxLength": 5},
    {"type": "integer"},
    {"type": "integer", "minimum": -5, "maximum": 5},
    {"type": "integer", "multipleOf": 7},
    {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    {"type": "boolean"},
    {"type": "null"},
    {"enum": ["red", "green", 3, None, [1]]},
    {"const": {"a": [1, "x"]}},
    {"type": ["integer", "null"]},
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 4}]},
    {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
    {"type": "array", "items": TEXT, "minItems": 2, "maxItems": 2},
    {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}], "items": False, "minItems": 2},
    {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "maxItems": 2},
    {"type": "object", "properties": {"a": TEXT}, "required": ["a"], "additionalProperties": False},
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": TEXT}, "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 2},
    {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a", "b"]},
    {
        "type": "object",
        "properties": {"point": {"$ref": "#/$defs/point"}},
        "required": ["point"],
        "additionalProperties": False,
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
                "required": ["x", "y"],
                "additionalProperties": False,
            }
        },
    },
    {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer", "maximum": 9},
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
                },
                "required": ["v"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
    {
        "anyOf": [
            {"type": "object", "properties": {"k": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["k"]},
            {"type": "object", "properties": {"k": {"const": "dog"}, "good": {"type": "boolean"}}, "required": ["k"]},
        ]
    },
    {"type": "object", "properties": {"größe": {"enum": ["klein", "groß 🙂"]}}, "required": ["größe"]},
    {"type": "object"},
]
PROMPT = "Here is a short value in JSON that follows the schema "
MIXED = list(range(0, len(SCHEMAS), 4))


def with_schema(i: int, **fields: Any) -> SamplingParams:
    """Greedy and seeded by turns; some with what else bears upon the choice of tokens."""
    chosen: dict[str, Any] = {"temperature": 0.0} if i % 2 else {"temperature": 0.8, "seed": i, "top_p": 0.95}
    if i % 3 == 0:
        chosen |= {"repetition_penalty": 1.1, "min_tokens": 4, "logprobs": 1}
    grammar = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMAS[i]))
    return SamplingParams(**{"max_tokens": 40, "grammar": grammar, **chosen, **fields})


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return [tokenizer.encode(f"{PROMPT}{json.dumps(schema)[:200]}:\n") for schema in SCHEMAS]


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    engine = Alone()
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def expected(alone: Alone, prompts: list[list[int]]) -> list[Answer]:
    return alone.generate(prompts, [with_schema(i) for i in range(len(SCHEMAS))])


def run(
    alone: Alone, prompt: list[int], sampling: SamplingParams, output: list[int] | None = None
) -> list[RequestOutput]:
    """All outputs of one request, which goes on behind ``output``."""
    alone.core.add_request(
        AddRequest(request_id="one", prompt_token_ids=prompt, output_token_ids=output or [], sampling=sampling)
    )
    outputs = alone.core.step()
    while not outputs or outputs[-1].finish_reason is None:
        outputs += alone.core.step()
    return outputs


def assert_same(found: list[Answer], expected: list[Answer]) -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (i, a.token_ids, a.finish_reason, a.logprobs) == (i, b.token_ids, b.finish_reason, b.logprobs)


def test_what_ends_by_itself_is_valid_and_what_is_cut_says_so(expected: list[Answer], tokenizer: Tokenizer) -> None:
    num_whole = 0
    for schema, answer in zip(SCHEMAS, expected, strict=True):
        if answer.finish_reason is FinishReason.LENGTH:
            assert len(answer.token_ids) == 40
            assert EOS not in answer.token_ids
            continue
        assert answer.finish_reason is FinishReason.STOP
        assert answer.token_ids[-1] == EOS
        Draft202012Validator(schema).validate(json.loads(tokenizer.decode(answer.token_ids)))
        num_whole += 1
    assert num_whole > len(SCHEMAS) * 2 / 3


def test_through_prefill_and_decode_the_tokens_are_the_same(
    expected: list[Answer], prompts: list[list[int]], tmp_path: Path
) -> None:
    """Beside requests without a grammar, with blocks so few that some are preempted."""
    free = [SamplingParams(temperature=0.7, seed=seed, max_tokens=64, ignore_eos=True) for seed in range(4)]
    pair = PDPair(
        connector="shared_storage",
        connector_options={"path": str(tmp_path)},
        max_model_len=256,
        block_size=4,
        decode={"num_blocks": 90},
    )
    try:
        chosen = [prompts[i] for i in MIXED]
        answers = pair.generate([*chosen, *prompts[: len(free)]], [*(with_schema(i) for i in MIXED), *free])
        assert_same(answers[: len(MIXED)], [expected[i] for i in MIXED])
        assert any("preempted" in answer.events for answer in answers)
        assert all(answer.num_external_tokens for answer in answers)
        undisturbed = [pair.generate([prompt], each)[0] for prompt, each in zip(prompts, free, strict=False)]
    finally:
        pair.close()
    assert_same(answers[len(MIXED) :], undisturbed)


@pytest.mark.parametrize("num_before", [1, 5])
def test_after_a_loss_another_engine_goes_on_with_the_same_tokens(
    alone: Alone, expected: list[Answer], prompts: list[list[int]], num_before: int
) -> None:
    i = 25
    whole = expected[i].token_ids
    assert len(whole) > num_before
    rest = run(alone, prompts[i], with_schema(i), whole[:num_before])
    assert [*whole[:num_before], *(token_id for output in rest for token_id in output.new_token_ids)] == whole


def test_a_grammar_that_costs_too_much_ends_its_request_and_the_engine_lives(
    alone: Alone, expected: list[Answer], prompts: list[list[int]]
) -> None:
    hostile = SamplingParams(
        temperature=2.0, seed=1, max_tokens=400, grammar=GrammarSpec(GrammarKind.REGEX, "(.{1,100}a){1,100}")
    )
    last = run(alone, prompts[0], hostile)[-1]
    assert last.finish_reason is FinishReason.ERROR
    error = last.error
    assert error is not None
    assert (error.http_status, error.retryable, error.param) == (400, False, "grammar")
    assert_same(alone.generate([prompts[5]], with_schema(5)), [expected[5]])
