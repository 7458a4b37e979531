"""Requests for two engines: what is asked, and what one engine alone answers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pdserve.connectors.testing.bench import Bench
from pdserve.connectors.testing.engines.pair import BLOCK_SIZE, Answer, EnginePair, answer_alone, build_oracle
from pdserve.connectors.testing.engines.tiny_model import VOCAB_SIZE, write_tiny_model
from pdserve.protocol import SamplingParams

_NUM_TOKENS = 12
_LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 40, 77, 130)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, how it is sampled, and the one right answer."""

    prompt: list[int]
    sampling: SamplingParams
    expected: list[int]


def build_questions(bench: Bench, *, num_questions: int = 16) -> tuple[Path, list[Question]]:
    """A model and questions to it, with shared beginnings and lengths around a block; greedy and seeded."""
    model = write_tiny_model(bench.target.directory / "tiny-model")
    rng = random.Random(bench.make_prompt(1)[0])
    shared = [rng.randrange(2, VOCAB_SIZE) for _ in range(2 * BLOCK_SIZE)]
    oracle = build_oracle(model)
    questions = []
    for number in range(num_questions):
        tail = [rng.randrange(2, VOCAB_SIZE) for _ in range(_LENGTHS[number % len(_LENGTHS)])]
        prompt = [*shared, *tail] if number % 3 == 0 else tail
        is_greedy = number % 2 == 0
        sampling = SamplingParams(
            temperature=0.0 if is_greedy else 0.9, seed=number, max_tokens=_NUM_TOKENS, ignore_eos=True
        )
        questions.append(Question(prompt, sampling, answer_alone(oracle, prompt, sampling).token_ids))
    oracle.close()
    return model, questions


@contextmanager
def engine_pair(bench: Bench, model: Path, **settings: dict[str, int]) -> Iterator[EnginePair]:
    """Two engines, closed at the end; ``settings`` are those of `EnginePair`."""
    pair = EnginePair(bench, model, **settings)
    try:
        yield pair
    finally:
        pair.close()


def ask(bench: Bench, pair: EnginePair, questions: Sequence[Question]) -> list[Answer]:
    """Ask all at once; every answer is compared with the one engine's."""
    answers = [pair.submit(question.prompt, question.sampling)[1] for question in questions]
    pair.run()
    require_exact(bench, questions, answers)
    return answers


def require_exact(bench: Bench, questions: Sequence[Question], answers: Sequence[Answer]) -> None:
    """Answers that were not aborted are token for token those of one engine."""
    for number, (question, answer) in enumerate(zip(questions, answers, strict=True)):
        if not answer.is_aborted:
            bench.require(
                answer.token_ids == question.expected,
                f"question {number} of {len(question.prompt)} tokens: two engines say {answer.token_ids}, one alone "
                f"{question.expected}",
            )
