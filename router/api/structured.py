"""What an answer has to look like: the grammar that a client's fields ask for, whichever of them it is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pdserve.errors import RequestError
from pdserve.grammars import check_grammar
from pdserve.protocol import GrammarKind, GrammarSpec
from pdserve.router.api.request_types import GenerationFields, ResponseFormat, StructuredOutputs
from pdserve.router.api.service import run_tokenizer

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class AskedGrammar:
    """A grammar and where it comes from.

    Attributes:
        spec: the grammar.
        field: the client's field that asks for it.
        schema: the JSON schema that it was made of; None where it is another kind of grammar.
    """

    spec: GrammarSpec
    field: str
    schema: dict[str, Any] | None = None

    async def check(self) -> None:
        """Check that it can be followed; in a thread when it is long.

        Raises:
            RequestError: it cannot; names the client's field.
        """
        try:
            await run_tokenizer(lambda: check_grammar(self.spec), len(self.spec.text))
        except RequestError as error:
            name_field(error, self.field)
            raise


def name_field(error: RequestError, field: str) -> None:
    """Give an error that is about the grammar the name of the client's field."""
    if error.param == "grammar":
        error.param = field


def find_grammar(fields: GenerationFields) -> AskedGrammar | None:
    """The grammar that ``response_format`` or ``structured_outputs`` asks for; None where neither does.

    Raises:
        RequestError: both do, or one says too little or too much.
    """
    by_format = None if fields.response_format is None else _read_response_format(fields.response_format)
    by_extension = None if fields.structured_outputs is None else _read_structured_outputs(fields.structured_outputs)
    if by_format is not None and by_extension is not None:
        raise RequestError("structured_outputs and response_format cannot both be set", param="structured_outputs")
    return by_format or by_extension


def _read_response_format(asked: ResponseFormat) -> AskedGrammar | None:
    wrapped = asked.json_schema
    if (asked.type == "json_schema") != (wrapped is not None):
        verb = "needs" if wrapped is None else "takes no"
        raise RequestError(
            f"response_format of type {asked.type} {verb} json_schema", param="response_format.json_schema"
        )
    if asked.type == "text":
        return None
    return _ask_for_json(_ANY_OBJECT if wrapped is None else wrapped.json_schema, "response_format")


def _read_structured_outputs(asked: StructuredOutputs) -> AskedGrammar:
    field = "structured_outputs"
    names = asked.__struct_fields__
    num_given = sum(getattr(asked, name) not in (None, False) for name in names)
    if num_given != 1:
        raise RequestError(
            f"structured_outputs asks for {num_given} things; it takes one of {', '.join(names)}", param=field
        )
    if isinstance(asked.json, dict):
        return _ask_for_json(asked.json, field)
    if asked.json is not None:
        return AskedGrammar(GrammarSpec(GrammarKind.JSON_SCHEMA, asked.json), field)
    if asked.regex is not None:
        return AskedGrammar(GrammarSpec(GrammarKind.REGEX, asked.regex), field)
    if asked.choice is not None:
        choices = " | ".join(json.dumps(text, ensure_ascii=False) for text in asked.choice)
        return AskedGrammar(GrammarSpec(GrammarKind.LARK, f"start: {choices}"), field)
    if asked.grammar is not None:
        return AskedGrammar(GrammarSpec(GrammarKind.LARK, asked.grammar), field)
    return _ask_for_json(_ANY_OBJECT, field)


def _ask_for_json(schema: dict[str, Any], field: str) -> AskedGrammar:
    try:
        text = json.dumps(schema)
    except RecursionError:
        raise RequestError(f"{field} nests too deep", param=field) from None
    return AskedGrammar(GrammarSpec(GrammarKind.JSON_SCHEMA, text), field, schema)
