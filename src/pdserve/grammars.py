"""Grammars that answers must follow: what is taken of them, and in the form that llguidance reads.

The router checks a grammar before it sends a request, and the engine, which trusts nobody, before it takes one. Knows
no tokenizer: what a grammar means in tokens is `pdserve.engine.sampling.grammar_masks`' part.

A grammar comes from a client, so its cost is bounded: its length here, the work of reading it and of each step by
counts (`LIMITS`), never by a clock, so that every instance refuses the same ones.
"""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLParserLimits

from pdserve.errors import RequestError
from pdserve.protocol import GrammarKind, GrammarSpec

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_GRAMMAR_CHARACTERS = 65_536

LIMITS = LLParserLimits(
    max_items_in_row=4_000,
    initial_lexer_fuel=300_000,
    step_lexer_fuel=100_000,
    step_max_items=20_000,
    max_lexer_states=10_000,  # 5.5 kB each
    max_grammar_size=50_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
"""Tens of milliseconds to read a grammar, some milliseconds a token, 55 MB of states; ordinary schemas need a tenth."""

_SCHEMA_OPTIONS: JsonCompileOptions = {
    # Any amount of it would let a model go on with whitespace for ever.
    "whitespace_pattern": r"[ ]?|\n[ \t]{0,20}",
    "coerce_one_of": False,
    "lenient": False,
}
_MAX_REASON_CHARACTERS = 200


def check_grammar(grammar: GrammarSpec) -> None:
    """Check that a grammar can be followed.

    Raises:
        RequestError: it is too long, cannot be read, asks for what is not supported, or nothing can satisfy it;
            ``param`` is "grammar".
    """
    if len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
        raise RequestError(
            f"the grammar has {len(grammar.text)} characters; at most {MAX_GRAMMAR_CHARACTERS} are taken",
            param="grammar",
        )
    reason = _find_mistake(grammar)
    if reason:
        raise build_grammar_error(reason)


def build_grammar_error(reason: str) -> RequestError:
    """What a client hears when its grammar cannot be followed, from the library's own words."""
    lines = " ".join(line.strip() for line in reason.replace("<non-verbose/>", "").splitlines())
    return RequestError(f"the grammar cannot be followed: {lines.strip()[:_MAX_REASON_CHARACTERS]}", param="grammar")


def build_source(grammar: GrammarSpec) -> str:
    """The grammar as llguidance reads it.

    Raises:
        ValueError: a JSON schema that is no JSON.
    """
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(grammar.text, overrides=_SCHEMA_OPTIONS)
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)


def embed_schema(schema: dict[str, Any]) -> str:
    """A JSON schema as a term of a Lark grammar."""
    return "%json " + json.dumps({**schema, "x-guidance": _SCHEMA_OPTIONS})


@functools.lru_cache(maxsize=64)
def _find_mistake(grammar: GrammarSpec) -> str:
    try:
        return LLMatcher.validate_grammar(build_source(grammar), limits=LIMITS)
    except ValueError as error:
        return str(error)
