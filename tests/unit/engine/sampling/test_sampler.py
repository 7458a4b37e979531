"""The sampler: distributions, filters, ties, and that nothing but the row itself decides."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pdserve.engine.sampling.draw import draw_uniform
from pdserve.engine.sampling.logprobs import build_token_logprobs
from pdserve.engine.sampling.sampler import Sampler, SamplingRow, choose_token
from pdserve.protocol import SamplingParams

EOS = 3
VOCAB = 50
GREEDY = SamplingParams(temperature=0.0)


def make_row(request_id: str, params: SamplingParams, tokens: list[int], num_prompt: int) -> SamplingRow:
    return SamplingRow(request_id, params, lambda: np.array(tokens, dtype=np.int32), num_prompt)


def sample_one(logits: torch.Tensor, params: SamplingParams, tokens: list[int], num_prompt: int) -> int:
    output = Sampler(frozenset({EOS})).sample(logits[None], [make_row("r", params, tokens, num_prompt)])
    return output.token_ids["r"]


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def test_draws_are_fixed_by_seed_and_position_and_look_uniform() -> None:
    assert draw_uniform(1, 5) == draw_uniform(1, 5)
    assert draw_uniform(1, 5) != draw_uniform(1, 6)
    assert draw_uniform(1, 5) != draw_uniform(2, 5)
    assert 0 <= draw_uniform(-1, 0) < 1
    draws = [draw_uniform(7, i) for i in range(20_000)]
    assert abs(sum(draws) / len(draws) - 0.5) < 0.01
    counts = torch.histc(torch.tensor(draws), bins=10, min=0, max=1)
    assert float(counts.min()) > 1800


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(VOCAB)
    logits[[9, 4, 30]] = 5.0
    assert sample_one(logits, GREEDY, [1], 1) == 4


def test_the_likeliest_tokens_need_no_logits() -> None:
    rows = [make_row(f"r{i}", GREEDY, [1], 1) for i in range(3)]
    logits = torch.tensor([4.0, torch.nan, -2.0])
    output = Sampler(frozenset({EOS})).take_likeliest(torch.tensor([7, 8, 9]), logits, rows)
    assert output.token_ids == {"r0": 7, "r2": 9}
    assert output.failed == {"r1": "the model produced logits that are not finite"}
    assert not output.logprobs


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(top_k=3), {0, 1, 2}),
        (SamplingParams(top_p=0.6), {0, 1}),
        (SamplingParams(top_p=0.01), {0}),
        (SamplingParams(min_p=0.3), {0, 1}),
        (SamplingParams(top_k=3, top_p=0.99), {0, 1, 2}),
        (SamplingParams(temperature=1e-6), {0}),
        (SamplingParams(top_k=-1), set(range(6))),
    ],
)
def test_filters_keep_exactly_the_tokens_they_should(params: SamplingParams, allowed: set[int]) -> None:
    probabilities = torch.tensor([0.45, 0.25, 0.12, 0.1, 0.05, 0.03])
    chosen = {choose_token(probabilities.log(), params, (i + 0.5) / 500) for i in range(500)}
    assert chosen == allowed


def test_top_k_keeps_all_tokens_that_tie_for_the_last_place() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    chosen = {choose_token(logits, SamplingParams(top_k=2), (i + 0.5) / 100) for i in range(100)}
    assert chosen == {0, 1, 2, 3}


def test_sampling_follows_the_distribution() -> None:
    logits = random_logits(1)[0]
    expected = torch.softmax(logits / 0.8, dim=-1)
    params = SamplingParams(temperature=0.8)
    count = 20_000
    chosen = torch.tensor([choose_token(logits, params, draw_uniform(11, i)) for i in range(count)])
    observed = torch.bincount(chosen, minlength=VOCAB) / count
    assert float((observed - expected).abs().max()) < 0.012


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2.0**-53])
def test_extreme_draws_never_choose_a_token_without_weight(uniform: float) -> None:
    logits = torch.tensor([-torch.inf, 1.0, -torch.inf, 2.0, -torch.inf])
    assert choose_token(logits, SamplingParams(), uniform) in {1, 3}


def test_nucleus_of_a_flat_distribution_is_found_beyond_the_first_look() -> None:
    logits = torch.arange(10_000, dtype=torch.float32).neg() * 1e-5
    params = SamplingParams(top_p=0.5)
    largest = max(choose_token(logits, params, u) for u in (0.9999, 0.99999))
    weights = logits.double().exp().cumsum(0)
    cut = int((weights >= 0.5 * weights[-1]).nonzero()[0])
    assert largest <= cut
    assert largest > cut - 10


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = random_logits(16)
    sampler = Sampler(frozenset({EOS}))
    rows = [make_row(f"r{i}", SamplingParams(seed=i, top_p=0.9, top_k=20, logprobs=3), [1, 2, i], 2) for i in range(16)]
    together = sampler.sample(logits, rows)
    for i, row in enumerate(rows):
        alone = sampler.sample(logits[i : i + 1], [row])
        assert alone.token_ids[row.request_id] == together.token_ids[row.request_id]
        assert alone.logprobs[row.request_id] == together.logprobs[row.request_id]


def test_eos_and_stop_tokens_are_held_back_until_min_tokens() -> None:
    logits = torch.zeros(VOCAB)
    logits[EOS], logits[8], logits[20] = 9.0, 8.0, 7.0
    params = SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(8,))
    assert sample_one(logits, params, [1, 2], 2) == 20
    assert sample_one(logits, params, [1, 2, 20], 2) == 20
    assert sample_one(logits, params, [1, 2, 20, 20], 2) == EOS


def test_penalties_follow_their_definitions() -> None:
    logits = torch.full((VOCAB,), -5.0)
    logits[10], logits[11], logits[12] = 4.0, 3.9, 3.0
    assert sample_one(logits, GREEDY, [10], 1) == 10
    repetition = SamplingParams(temperature=0.0, repetition_penalty=1.5)
    assert sample_one(logits, repetition, [10], 1) == 11  # the prompt counts
    presence = SamplingParams(temperature=0.0, presence_penalty=0.5)
    assert sample_one(logits, presence, [10], 1) == 10  # the prompt does not count
    assert sample_one(logits, presence, [1, 10], 1) == 11
    frequency = SamplingParams(temperature=0.0, frequency_penalty=0.4)
    assert sample_one(logits, frequency, [1, 10, 11, 10, 11, 10, 11], 1) == 12
    bias = SamplingParams(temperature=0.0, logit_bias={12: 50.0, 10: -100.0})
    assert sample_one(logits, bias, [1], 1) == 12


def test_logprobs_are_of_the_unmodified_distribution_with_ties_in_order_of_id() -> None:
    logits = torch.zeros(VOCAB)
    logits[[30, 5, 17]] = 2.0
    entry = build_token_logprobs(logits, 17, 2)
    assert entry.top_ids == [5, 17]
    assert entry.rank == 1
    total = 3 * math.exp(2.0) + (VOCAB - 3)
    assert entry.logprob == pytest.approx(2.0 - math.log(total), abs=1e-6)
    assert build_token_logprobs(logits, 0, 0).rank == 4


def test_row_that_is_not_finite_fails_alone() -> None:
    logits = random_logits(2)
    logits[0, 7] = torch.nan
    rows = [make_row("bad", GREEDY, [1], 1), make_row("good", GREEDY, [1], 1)]
    output = Sampler(frozenset({EOS})).sample(logits, rows)
    assert list(output.failed) == ["bad"]
    assert output.token_ids == {"good": int(logits[1].argmax())}
