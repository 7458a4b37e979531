"""Masks: only what the grammar allows, whoever asks and however the place in it was reached."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator

from pdserve.checkpoint import prepare_tokenizer, resolve_model
from pdserve.engine.sampling.grammar_masks import GrammarCompiler, GrammarMask
from pdserve.engine.sampling.sampler import Sampler, SamplerOutput, SamplingRow
from pdserve.errors import RequestError
from pdserve.protocol import GrammarKind, GrammarSpec, SamplingParams
from pdserve.text import Tokenizer, load_tokenizer

EOS = 2
PROMPT = [5, 6, 7]
MODEL = "smollm2-135m-instruct"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b c", None]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def of_schema(schema: Any) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def of_regex(regex: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, regex)


@pytest.fixture(scope="module")
def directory() -> Path:
    return prepare_tokenizer(resolve_model(MODEL))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def compiler(directory: Path, tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(directory, tokenizer.vocab_size, {EOS})


@pytest.fixture(scope="module")
def sampler(compiler: GrammarCompiler) -> Sampler:
    return Sampler(frozenset({EOS}), compiler)


def find_allowed(mask: GrammarMask, output: list[int]) -> list[int]:
    allowed_V = mask.find_allowed(np.array(output, dtype=np.int32))
    return [int(token_id) for token_id in allowed_V.nonzero()[0]]


def sample(sampler: Sampler, logits: torch.Tensor, params: SamplingParams, output: list[int]) -> SamplerOutput:
    token_ids = np.array([*PROMPT, *output], dtype=np.int32)
    return sampler.sample(logits[None], [SamplingRow("r", params, lambda: token_ids, len(PROMPT))])


def walk(
    sampler: Sampler, tokenizer: Tokenizer, params: SamplingParams, seed: int, max_tokens: int = 120
) -> str | None:
    """The answer of a model that knows nothing, hurries to the end, and knows JSON's marks; None if it never ends."""
    generator = torch.Generator().manual_seed(seed)
    output: list[int] = []
    row = SamplingRow("r", params, lambda: np.array([*PROMPT, *output], dtype=np.int32), len(PROMPT))
    hurry = torch.zeros(tokenizer.vocab_size)
    hurry[[EOS, *(i for mark in '"}],: ' for i in tokenizer.encode(mark))]] = 6.0
    while len(output) < max_tokens:
        logits = torch.randn(tokenizer.vocab_size, generator=generator) * 2 + hurry
        (token_id,) = sampler.sample(logits[None], [row]).token_ids.values()
        if token_id == EOS:
            return tokenizer.decode(output)
        output.append(token_id)
    return None


@pytest.mark.parametrize("seed", range(8))
def test_a_random_walk_under_a_schema_ends_in_a_valid_object(sampler: Sampler, tokenizer: Tokenizer, seed: int) -> None:
    text = walk(sampler, tokenizer, SamplingParams(temperature=1.0, seed=seed, grammar=of_schema(PERSON)), seed)
    assert text is not None
    Draft202012Validator(PERSON).validate(json.loads(text))


@pytest.mark.parametrize("regex", [r"[a-z]{3}-\d{2,4}", r"(ja|nein) ?!*", r"[äöü]+x", r"\{\"a\": [0-9]\}"])
def test_a_random_walk_under_a_regex_matches_it(sampler: Sampler, tokenizer: Tokenizer, regex: str) -> None:
    text = walk(sampler, tokenizer, SamplingParams(temperature=0.0, grammar=of_regex(regex)), 1)
    assert text is not None
    assert re.fullmatch(regex, text)


@pytest.mark.parametrize("grammar", [of_schema(PERSON), of_schema({}), of_regex("(ab|c){2,9}d?")])
def test_a_place_read_from_the_tokens_is_the_one_that_was_walked_to(
    compiler: GrammarCompiler, grammar: GrammarSpec
) -> None:
    choose = random.Random(3)
    walked, output = compiler.start(grammar), []
    for _ in range(25):
        allowed = find_allowed(walked, output)
        assert find_allowed(compiler.start(grammar), output) == allowed
        token_id = choose.choice(allowed)
        if token_id == EOS:
            break
        output.append(token_id)


def test_exactly_the_tokens_that_can_begin_a_choice_are_allowed(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    choices = ["yes", "yeah", "no", "Nö 🙂"]
    grammar = GrammarSpec(GrammarKind.LARK, "start: " + " | ".join(json.dumps(c, ensure_ascii=False) for c in choices))
    allowed = find_allowed(compiler.start(grammar), [])
    encoded = [choice.encode() for choice in choices]
    assert allowed == [
        i for i in range(tokenizer.vocab_size)
        if not tokenizer.is_special(i) and any(c.startswith(tokenizer.token_bytes(i)) for c in encoded)
    ]  # fmt: skip


def test_what_spells_a_special_token_is_text(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    allowed = find_allowed(compiler.start(GrammarSpec(GrammarKind.LARK, 'start: "<|im_end|>"')), [])
    assert allowed
    assert not any(tokenizer.is_special(token_id) for token_id in allowed)


def test_eos_comes_only_where_the_answer_is_whole_and_there_at_last(sampler: Sampler, tokenizer: Tokenizer) -> None:
    logits = torch.zeros(tokenizer.vocab_size)
    logits[EOS] = 50.0
    params = SamplingParams(temperature=0.0, grammar=of_regex("a{2,4}"))
    (a,), (aa,) = tokenizer.encode("a"), tokenizer.encode("aa")
    assert sample(sampler, logits, params, []).token_ids["r"] in (a, aa)
    assert sample(sampler, logits, params, [a]).token_ids["r"] in (a, aa)
    assert sample(sampler, logits, params, [a, a]).token_ids["r"] == EOS
    assert sample(sampler, torch.zeros(tokenizer.vocab_size), params, [aa, aa]).token_ids["r"] == EOS


def test_min_tokens_hold_the_end_back_while_the_grammar_can_go_on(sampler: Sampler, tokenizer: Tokenizer) -> None:
    logits = torch.zeros(tokenizer.vocab_size)
    logits[EOS] = 50.0
    params = SamplingParams(temperature=0.0, grammar=of_regex("a{2,4}"), min_tokens=9)
    (a,) = tokenizer.encode("a")
    assert sample(sampler, logits, params, [a, a]).token_ids["r"] == a
    assert sample(sampler, logits, params, [a, a, a, a]).token_ids["r"] == EOS


def test_bias_and_penalties_choose_among_the_allowed(sampler: Sampler, tokenizer: Tokenizer) -> None:
    yes, no, other = (tokenizer.encode(text)[0] for text in ("yes", "no", "maybe"))
    grammar = of_regex("(yes|no){4}")
    logits = torch.zeros(tokenizer.vocab_size)
    logits[yes], logits[no], logits[other] = 2.0, 1.0, 9.0
    for params, output, expected in (
        (SamplingParams(temperature=0.0, grammar=grammar), [], yes),
        (SamplingParams(temperature=0.0, grammar=grammar, logit_bias={no: 5.0, other: 100.0}), [], no),
        (SamplingParams(temperature=0.0, grammar=grammar, presence_penalty=1.5), [yes], no),
        (SamplingParams(temperature=0.5, seed=1, top_k=1, grammar=grammar), [], yes),
    ):
        assert sample(sampler, logits, params, output).token_ids["r"] == expected


def test_logprobs_are_those_of_the_model_not_of_the_grammar(sampler: Sampler, tokenizer: Tokenizer) -> None:
    logits = torch.randn(tokenizer.vocab_size, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=0.0, grammar=of_regex("yes"), logprobs=1)
    output = sample(sampler, logits, params, [])
    entry, token_id = output.logprobs["r"], output.token_ids["r"]
    assert entry.top_ids == [int(logits.argmax())]
    assert entry.logprob == float(torch.log_softmax(logits, 0)[token_id])
    assert entry.rank > 1


def test_rows_beside_one_with_a_grammar_are_not_touched(sampler: Sampler, tokenizer: Tokenizer) -> None:
    logits = torch.randn(3, tokenizer.vocab_size, generator=torch.Generator().manual_seed(0))
    token_ids = np.array(PROMPT, dtype=np.int32)
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, grammar=of_regex("yes")),
        SamplingParams(seed=4),
    ]
    rows = [SamplingRow(f"r{i}", p, lambda: token_ids, len(PROMPT)) for i, p in enumerate(params)]
    together = sampler.sample(logits, rows)
    alone = [Sampler(frozenset({EOS})).sample(logits[i : i + 1], [rows[i]]) for i in (0, 2)]
    assert [together.token_ids["r0"], together.token_ids["r2"]] == [
        one.token_ids[f"r{i}"] for one, i in zip(alone, (0, 2), strict=True)
    ]
    assert rows[0].is_plain
    assert not rows[1].is_plain


def test_tokens_that_do_not_follow_the_grammar_end_the_request_alone(sampler: Sampler, tokenizer: Tokenizer) -> None:
    params = SamplingParams(temperature=0.0, grammar=of_regex("yes"))
    output = sample(sampler, torch.zeros(tokenizer.vocab_size), params, tokenizer.encode("no"))
    assert not output.token_ids
    assert "cannot be followed" in output.refused["r"]


@pytest.mark.parametrize(
    "grammar",
    [
        of_schema({"$ref": "#"}),
        GrammarSpec(GrammarKind.LARK, "start: x\nx: x"),
        of_schema({"type": "strin"}),
    ],
)
def test_what_nothing_satisfies_is_refused_before_it_runs(compiler: GrammarCompiler, grammar: GrammarSpec) -> None:
    with pytest.raises(RequestError) as caught:
        compiler.compile(grammar)
    assert caught.value.param == "grammar"


def test_a_hostile_regex_ends_its_request_and_no_other_of_the_same_grammar(
    compiler: GrammarCompiler, tokenizer: Tokenizer
) -> None:
    """Every text of it is another state of the lexer, of which there may be so many."""
    grammar = of_regex(".*a.{300}")
    choose = random.Random(1)
    output: list[int] = []
    mask = compiler.start(grammar)

    def walk_on() -> None:
        while len(output) < 1000:
            output.append(choose.choice(find_allowed(mask, output)))

    with pytest.raises(RequestError, match="states"):
        walk_on()
    assert find_allowed(compiler.start(grammar), output[:5])


def test_compiled_grammars_are_kept_but_not_for_ever(compiler: GrammarCompiler) -> None:
    first = compiler.compile(of_regex("first"))
    assert compiler.compile(of_regex("first")) is first
    for i in range(40):
        compiler.compile(of_regex(f"other {i}"))
    assert compiler.compile(of_regex("first")) is not first


def test_a_model_without_tokenizer_or_end_refuses_grammars(tmp_path: Path, directory: Path) -> None:
    with pytest.raises(RequestError, match="tokenizer"):
        GrammarCompiler(tmp_path, 100, {EOS}).compile(of_regex("a"))
    with pytest.raises(RequestError, match="ends an answer"):
        GrammarCompiler(directory, 100, ()).compile(of_regex("a"))
