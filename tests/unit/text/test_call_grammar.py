"""Calls that must come: in whatever a model writes under the grammar, the reader finds calls with valid arguments."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from tiny_tokenizers import write_byte_level, write_spm
from tokenizers import AddedToken

from pdserve.engine.sampling.grammar_masks import GrammarCompiler
from pdserve.protocol import GrammarKind, GrammarSpec
from pdserve.text import Tokenizer, load_tokenizer
from pdserve.text.tool_calls import FORMATS, ToolCallReader, build_call_grammar

EOS = "<eos>"
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", 'Zürich "west"']}, "days": {"type": "integer", "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    'odd "name"\n': {"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False},
}
TAGS = ("<tool_call>", "</tool_call>", "[TOOL_CALLS]")


def build(directory: Path, special: tuple[str, ...]) -> tuple[Tokenizer, GrammarCompiler]:
    added = [AddedToken(text, special=True, normalized=False) for text in (EOS, *special)]
    tokenizer = load_tokenizer(write_byte_level(directory, added, [], eos_token=EOS))
    return tokenizer, GrammarCompiler(directory, tokenizer.vocab_size, tokenizer.eos_token_ids)


def walk(compiler: GrammarCompiler, text: str, end: int, seed: int) -> list[int]:
    """Tokens of an answer by somebody who knows nothing, up to EOS."""
    choose = random.Random(seed)
    mask = compiler.start(GrammarSpec(GrammarKind.LARK, text))
    output: list[int] = []
    while True:
        allowed = mask.find_allowed(np.array(output, dtype=np.int32)).nonzero()[0].tolist()
        token_id = end if end in allowed and choose.random() < 0.5 else choose.choice(allowed)
        if token_id == end:
            return output
        output.append(token_id)


def read(name: str, text: str) -> tuple[list[tuple[str | None, str]], str]:
    """Calls with their arguments, and the content."""
    reader = ToolCallReader(FORMATS[name], frozenset(SCHEMAS))
    deltas = [reader.push(text), reader.finish()]
    calls: dict[int, tuple[str | None, str]] = {}
    for call in (call for delta in deltas for call in delta.calls):
        known, arguments = calls.get(call.index, (None, ""))
        calls[call.index] = (call.name or known, arguments + call.arguments)
    return list(calls.values()), "".join(delta.content for delta in deltas)


@pytest.mark.parametrize("special", [(), TAGS], ids=["tags are text", "tags are tokens"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_walk_is_calls_with_valid_arguments_and_nothing_else(
    tmp_path: Path, name: str, special: tuple[str, ...]
) -> None:
    tokenizer, compiler = build(tmp_path, special)
    several = build_call_grammar(FORMATS[name], SCHEMAS, tokenizer, is_single=False)
    (end,) = tokenizer.eos_token_ids
    called: set[str | None] = set()
    counts = set()
    for seed in range(12):
        calls, content = read(name, tokenizer.decode(walk(compiler, several, end, seed), skip_special_tokens=False))
        assert content == ""
        for function, arguments in calls:
            assert function is not None
            Draft202012Validator(SCHEMAS[function]).validate(json.loads(arguments))
            called.add(function)
        counts.add(len(calls))
    assert called == set(SCHEMAS)
    assert 0 not in counts
    assert len(counts) > 1
    single = build_call_grammar(FORMATS[name], SCHEMAS, tokenizer, is_single=True)
    for seed in range(4):
        text = tokenizer.decode(walk(compiler, single, end, seed), skip_special_tokens=False)
        assert len(read(name, text)[0]) == 1


def test_content_of_a_schema_may_stand_for_calls(tmp_path: Path) -> None:
    tokenizer, compiler = build(tmp_path, ())
    schema = {"type": "object", "properties": {"a": {"type": "null"}}, "required": ["a"], "additionalProperties": False}
    text = build_call_grammar(FORMATS["hermes"], SCHEMAS, tokenizer, is_single=False, content_schema=schema)
    (end,) = tokenizer.eos_token_ids
    kinds = set()
    for seed in range(12):
        calls, content = read("hermes", tokenizer.decode(walk(compiler, text, end, seed)))
        kinds.add(bool(calls))
        if not calls:
            assert json.loads(content) == {"a": None}
    assert kinds == {True, False}


def test_a_tokenizer_that_puts_a_space_in_front_follows_grammars_to_the_byte(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_spm(tmp_path))
    compiler = GrammarCompiler(tmp_path, tokenizer.vocab_size, tokenizer.eos_token_ids)
    (end,) = tokenizer.eos_token_ids
    for text in ("hello world", "é 🙂 hello"):
        output = walk(compiler, f"start: {json.dumps(text, ensure_ascii=False)}", end, 0)
        assert b"".join(map(tokenizer.token_bytes, output)).decode() == text
