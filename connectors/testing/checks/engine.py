"""Real engines with a tiny model: what comes through two of them is what one gives alone.

The engine is imported when a check runs, so that contract and fault checks need none.
"""

from __future__ import annotations

import random

from pdserve.connectors.testing.bench import Bench
from pdserve.connectors.testing.check import Level, check, collect_checks

_SETTLE_S = 20.0


@check("R2", level=Level.ENGINE)
def two_engines_answer_as_one(bench: Bench) -> None:
    """Sixteen requests at once, greedy and seeded: the tokens are equal, and decode computes no prompt token."""
    from pdserve.connectors.testing.engines.load import ask, build_questions, engine_pair

    model, questions = build_questions(bench)
    with engine_pair(bench, model) as pair:
        answers = ask(bench, pair, questions)
        pair.settle(_SETTLE_S)
        hits, loaded = pair.count_hits(), pair.count_loaded_blocks()
    # What a connector does not count at all it may leave to others.
    bench.require(not loaded or hits == loaded, f"blocks by connector: {hits} found, {loaded} loaded", "R23")
    for question, answer in zip(questions, answers, strict=True):
        num_computed = len(question.prompt) - answer.num_cached_tokens
        bench.require(num_computed == 0, f"decode computed {num_computed} of {len(question.prompt)} prompt tokens")


@check("R6", level=Level.ENGINE)
def chunked_prefill_answers_the_same(bench: Bench) -> None:
    """A prefill engine that computes twenty tokens a step hands over the same KV."""
    from pdserve.connectors.testing.engines.load import ask, build_questions, engine_pair

    model, questions = build_questions(bench)
    with engine_pair(bench, model, prefill={"max_num_batched_tokens": 20}) as pair:
        ask(bench, pair, questions)
        pair.settle(_SETTLE_S)


@check("R8", level=Level.ENGINE)
def preemption_answers_the_same(bench: Bench) -> None:
    """Pools with room for little more than one request preempt, and nobody's tokens change."""
    from pdserve.connectors.testing.engines.load import ask, build_questions, engine_pair

    model, questions = build_questions(bench)
    with engine_pair(bench, model, decode={"num_blocks": 22}, prefill={"num_blocks": 40}) as pair:
        ask(bench, pair, questions)
        pair.settle(_SETTLE_S)


@check("R9", level=Level.ENGINE)
def aborts_under_load_leave_nothing(bench: Bench) -> None:
    """A third of forty-eight requests is aborted, at any moment; the others are exact and all blocks come back."""
    from pdserve.connectors.testing.engines.load import build_questions, engine_pair, require_exact

    model, questions = build_questions(bench)
    questions = questions * 3
    rng = random.Random(len(questions))
    with engine_pair(bench, model) as pair:
        answers = []
        for question in questions:
            request_id, answer = pair.submit(question.prompt, question.sampling)
            answers.append(answer)
            for _ in range(rng.randrange(3)):
                pair.step()
            if rng.random() < 1 / 3:
                pair.abort(request_id)
        pair.run()
        require_exact(bench, questions, answers)
        pair.settle(_SETTLE_S)


CHECKS = collect_checks(globals())
