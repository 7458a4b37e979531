"""What is taken of grammars: anything that can be followed within bounds, and the rest is refused with the reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.errors import RequestError
from pdserve.grammars import MAX_GRAMMAR_CHARACTERS, check_grammar, embed_schema
from pdserve.protocol import GrammarKind, GrammarSpec


def of_schema(schema: Any) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, schema if isinstance(schema, str) else json.dumps(schema))


def nest(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


@pytest.mark.parametrize(
    "grammar",
    [
        of_schema({}),
        of_schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(200)}}),
        of_schema({"enum": [f"value {i}" for i in range(500)]}),
        of_schema(nest(50)),
        of_schema({"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"}),
        GrammarSpec(GrammarKind.REGEX, ""),
        GrammarSpec(GrammarKind.REGEX, r"\d{3}-[äöü]+"),
        GrammarSpec(GrammarKind.LARK, 'start: "a" start | "b"'),
        GrammarSpec(GrammarKind.LARK, "start: " + embed_schema({"type": "string"})),
    ],
)
def test_what_can_be_followed_is_taken(grammar: GrammarSpec) -> None:
    check_grammar(grammar)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (of_schema("{"), "EOF"),
        (of_schema("[1]"), "object"),
        (of_schema({"type": "strin"}), "strin"),
        (of_schema({"uniqueItems": True}), "uniqueItems"),
        (of_schema({"properties": {"a": {"not": {}, "x-guidance": {"lenient": True}}}}), "not"),
        (of_schema({"not": {}, "x-guidance": {"lenient": True}}), "not"),
        (of_schema({"x": "\ud800"}), "hex escape"),
        (of_schema(nest(1000)), "recursion"),
        (of_schema({"enum": ["x" * MAX_GRAMMAR_CHARACTERS]}), "characters"),
        (of_schema({"anyOf": [{"enum": [f"{i}{j}" for i in range(60)]} for j in range(200)]}), ""),
        (GrammarSpec(GrammarKind.REGEX, "("), "unclosed"),
        (GrammarSpec(GrammarKind.REGEX, "(?=a)b"), "look-around"),
        (GrammarSpec(GrammarKind.REGEX, "\ud800"), "surrogate"),
        (GrammarSpec(GrammarKind.LARK, ""), "Empty"),
        (GrammarSpec(GrammarKind.LARK, "start: ((("), ""),
    ],
)
def test_what_cannot_be_followed_is_refused_with_the_reason(grammar: GrammarSpec, reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_grammar(grammar)
    assert caught.value.param == "grammar"
    assert caught.value.http_status == 400
    assert reason in caught.value.message
    assert len(caught.value.message) < 300
    assert "\n" not in caught.value.message


def test_a_schema_in_a_lark_grammar_has_our_options_whatever_it_says_itself() -> None:
    grammar = GrammarSpec(GrammarKind.LARK, "start: " + embed_schema({"not": {}, "x-guidance": {"lenient": True}}))
    with pytest.raises(RequestError, match="not"):
        check_grammar(grammar)
