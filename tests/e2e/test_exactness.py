"""The promise: a request's tokens, finish reason and logprobs are the ones a single engine gives it alone.

The oracle is one engine in which every request runs alone, its prompt in one chunk, nothing cached. Everything
else is compared with it by equality: P/D, batches, chunks, prefix hits, preemption, seeded sampling; in bfloat16
and in float32; with the real model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pd_pair import Alone, Answer, PDPair

from pdserve.protocol import SamplingParams

BLOCK = 16
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=2)
WHOLE = {"max_num_batched_tokens": 4096}


def seeded(i: int) -> SamplingParams:
    """Sampling with every knob that could go wrong over a hand-off."""
    return SamplingParams(
        temperature=0.9,
        top_p=0.95,
        top_k=50,
        seed=1000 + i,
        max_tokens=NUM_TOKENS,
        min_tokens=3,
        repetition_penalty=1.1,
        frequency_penalty=0.2,
        logprobs=2,
    )


def assert_same(found: list[Answer], expected: list[Answer]) -> None:
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (i, a.token_ids, a.finish_reason) == (i, b.token_ids, b.finish_reason)
        assert (i, a.logprobs) == (i, b.logprobs)


class Cases:
    """Prompts, their parameters and what the oracle says, for one dtype."""

    def __init__(self, dtype: str, prompts: list[list[int]], lengths: list[list[int]]) -> None:
        self.dtype = dtype
        self.prompts = [*prompts, *lengths]
        self.params = [GREEDY if i % 2 == 0 else seeded(i) for i in range(len(self.prompts))]
        oracle = Alone(dtype=dtype, enable_prefix_caching=False, **WHOLE)
        self.expected = [
            oracle.generate([prompt], params)[0] for prompt, params in zip(self.prompts, self.params, strict=True)
        ]
        oracle.close()

    def pick(self, step: int) -> tuple[list[list[int]], list[SamplingParams], list[Answer]]:
        """Every ``step``-th case and the long ones."""
        chosen = [i for i in range(len(self.prompts)) if i % step == 0 or len(self.prompts[i]) > 500]
        return (
            [self.prompts[i] for i in chosen],
            [self.params[i] for i in chosen],
            [self.expected[i] for i in chosen],
        )


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def cases(request: pytest.FixtureRequest, prompt_ids: list[list[int]], long_ids: list[list[int]]) -> Iterator[Cases]:
    """All prompts; lengths around a block and beyond 1,000 tokens. Fewer in float32, which is slower."""
    exact = [long_ids[0][:n] for n in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK)]
    if request.param == "bfloat16":
        yield Cases("bfloat16", prompt_ids, [*exact, *long_ids[:2]])
    else:
        yield Cases("float32", prompt_ids[::3], [*exact, long_ids[0]])


def test_oracle_is_worth_comparing_with(cases: Cases) -> None:
    assert len(cases.prompts) >= (50 if cases.dtype == "bfloat16" else 20)
    assert len({tuple(a.token_ids) for a in cases.expected}) > len(cases.expected) * 0.8


def test_prefill_decode_equals_one_engine(cases: Cases, tmp_path: Path) -> None:
    options = {"connector": "shared_storage", "connector_options": {"path": str(tmp_path)}}
    pair = PDPair(dtype=cases.dtype, **options)
    found = pair.generate(cases.prompts, cases.params)
    assert_same(found, cases.expected)
    for prompt, answer in zip(cases.prompts, found, strict=True):
        if "first_decode_step" in answer.events:
            assert answer.num_external_tokens + answer.num_cached_tokens >= len(prompt), "decode computed prompt tokens"
    pair.settle()
    assert pair.num_used_blocks == 0
    pair.close()


def test_batch_of_32_equals_batch_of_1(cases: Cases) -> None:
    engine = Alone(dtype=cases.dtype, max_num_seqs=32, enable_prefix_caching=False)
    assert_same(engine.generate(cases.prompts, cases.params), cases.expected)
    engine.close()


@pytest.mark.parametrize("budget", [16, 64, 1000])
def test_chunked_prefill_equals_whole(cases: Cases, budget: int) -> None:
    prompts, params, expected = cases.pick(4)
    engine = Alone(dtype=cases.dtype, max_num_batched_tokens=budget, enable_prefix_caching=False)
    assert_same(engine.generate(prompts, params), expected)
    engine.close()


def test_prefix_hit_equals_cold(cases: Cases) -> None:
    prompts, params, expected = cases.pick(3)
    engine = Alone(dtype=cases.dtype)
    assert_same(engine.generate(prompts, params), expected)
    warm = engine.generate(prompts, params)
    assert_same(warm, expected)
    hits = [a.num_cached_tokens for a in warm]
    assert hits == [(len(p) - 1) // BLOCK * BLOCK for p in prompts]
    # A prefix of another length, cut inside a block, hits what is there and computes the rest.
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    cut = prompts[longest][: len(prompts[longest]) // 2]
    cold = Alone(dtype=cases.dtype, enable_prefix_caching=False)
    assert_same(engine.generate([cut], GREEDY), cold.generate([cut], GREEDY))
    engine.close()
    cold.close()


def test_preempted_equals_undisturbed(cases: Cases) -> None:
    prompts, params, expected = cases.pick(3)
    short = [i for i, p in enumerate(prompts) if len(p) < 200][:12]
    params = [msgspec.structs.replace(params[i], max_tokens=NUM_TOKENS) for i in short]
    need = max(-(-(len(prompts[i]) + NUM_TOKENS) // 4) for i in short)
    engine = Alone(dtype=cases.dtype, block_size=4, num_blocks=need + 6)
    found = engine.generate([prompts[i] for i in short], params)
    assert_same(found, [expected[i] for i in short])
    preemptions: Any = engine.core.get_stats().preemptions
    assert preemptions._value.get() > 0
    engine.close()


def test_decode_engine_that_finds_nothing_recomputes_the_same(cases: Cases, tmp_path: Path) -> None:
    prompts, params, expected = cases.pick(6)
    pair = PDPair(
        dtype=cases.dtype,
        prefill={"connector": "shared_storage", "connector_options": {"path": str(tmp_path / "a")}},
        decode={"connector": "shared_storage", "connector_options": {"path": str(tmp_path / "b")}},
    )
    found = pair.generate(prompts, params)
    assert_same(found, expected)
    assert sum(a.num_external_tokens for a in found) == 0
    pair.close()


def test_small_decode_pool_preempts_after_the_load_and_stays_exact(cases: Cases, tmp_path: Path) -> None:
    prompts, params, expected = cases.pick(3)
    short = [i for i, p in enumerate(prompts) if len(p) < 200][:12]
    need = max(-(-(len(prompts[i]) + NUM_TOKENS) // 4) for i in short)
    pair = PDPair(
        dtype=cases.dtype,
        block_size=4,
        decode={"num_blocks": need + 6},
        connector="shared_storage",
        connector_options={"path": str(tmp_path)},
    )
    found = pair.generate([prompts[i] for i in short], [params[i] for i in short])
    assert_same(found, [expected[i] for i in short])
    pair.settle()
    assert pair.num_used_blocks == 0
    pair.close()
