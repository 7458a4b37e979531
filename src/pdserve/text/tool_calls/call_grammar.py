"""Answers that are tool calls, as a grammar: the model's own way of writing them, with arguments by their schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pdserve.grammars import embed_schema
from pdserve.text.tokenizer import Tokenizer
from pdserve.text.tool_calls.formats import ToolCallFormat

MAX_CALLS = 16
"""A small model that must call and may go on would otherwise repeat itself up to its token limit."""


def build_call_grammar(
    form: ToolCallFormat,
    schemas: Mapping[str, dict[str, Any]],
    tokenizer: Tokenizer,
    *,
    is_single: bool,
    content_schema: dict[str, Any] | None = None,
) -> str:
    """A Lark grammar of answers that `ToolCallReader` reads as calls, and as nothing else.

    Args:
        form: how the model writes calls.
        schemas: JSON schemas of the arguments, by the functions' names; each is of an object.
        tokenizer: the model's: a tag may be a special token.
        is_single: one call, otherwise one up to `MAX_CALLS`.
        content_schema: an answer may be a JSON value of this schema instead; None = it may not.
    """
    first, last = (_spell(text, form, tokenizer) for text in form.around_calls)
    before, behind = (_spell(text, form, tokenizer) for text in form.around_call)
    more = "" if is_single else f"({_spell(form.separator, form, tokenizer)} call){{0,{MAX_CALLS - 1}}}"
    choices = " | ".join(f"call_{index}" for index in range(len(schemas)))
    rules = [
        "start: calls" + ("" if content_schema is None else " | content"),
        f"calls: {first} call {more} {last}",
        f"call: {before} ({choices}) {behind}",
    ]
    if content_schema is not None:
        rules.append(f"content: {embed_schema(content_schema)}")
    for index, (name, schema) in enumerate(schemas.items()):
        rules.append(f'call_{index}: {_quote(form.begin_call(name))} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: {embed_schema(schema)}")
    return "\n".join(rules)


def _spell(text: str, form: ToolCallFormat, tokenizer: Tokenizer) -> str:
    """The terms of a text; a tag that is a special token is that token, which no text spells."""
    for tag in filter(None, (form.opening, form.closing)):
        token_id = tokenizer.token_to_id(tag)
        if tag in text and token_id is not None and tokenizer.is_special(token_id):
            before, _, behind = text.partition(tag)
            return f"{_quote(before)} <[{token_id}]> {_quote(behind)}"
    return _quote(text)


def _quote(text: str) -> str:
    """A term that stands for the text; nothing for none."""
    return json.dumps(text, ensure_ascii=False) if text else ""
