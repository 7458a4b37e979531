"""The real model through two engines with NIXL between them: token for token what one engine answers."""

from __future__ import annotations

import pytest
from pd_pair import Alone, PDPair

from pdserve.protocol import SamplingParams

pytest.importorskip("nixl")

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, ignore_eos=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tokens_are_those_of_one_engine_and_decode_computes_no_prompt(dtype: str, prompt_ids: list[list[int]]) -> None:
    prompts = [*prompt_ids[:8], *([7] * length for length in (15, 16, 17, 32))]
    oracle = Alone(dtype=dtype)
    expected = oracle.generate(prompts, GREEDY)
    oracle.close()
    # Small chunks: the last one of a prompt is computed steps after the first.
    pair = PDPair(connector="nixl", dtype=dtype, prefill={"max_num_batched_tokens": 48})
    for has_prefix_hits in (False, True):
        found = pair.generate(prompts, GREEDY)
        for answer, one, prompt in zip(found, expected, prompts, strict=True):
            assert (answer.token_ids, answer.logprobs) == (one.token_ids, one.logprobs)
            if not has_prefix_hits:
                assert answer.num_external_tokens > 0
            assert answer.num_cached_tokens >= len(prompt)
    pair.settle()
    assert pair.num_used_blocks == 0
    pair.close()


def test_a_lease_lasts_as_long_as_decodes_queue(prompt_ids: list[list[int]]) -> None:
    """The second request waits for the first one's last token, longer than a lease, and finds its KV all the same."""
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    options = {"connector_options": {"lease_s": 1.0}}
    pair = PDPair(connector="nixl", prefill=options, decode={**options, "max_num_seqs": 1})
    found = pair.generate(prompt_ids[:2], params)
    pair.settle()
    assert pair.num_used_blocks == 0
    pair.close()
    assert [answer.num_external_tokens for answer in found] == [len(prompt) for prompt in prompt_ids[:2]]


def test_answers_are_exact_when_no_lease_lasts(prompt_ids: list[list[int]]) -> None:
    """References lead nowhere: the prompts are computed again, to the same tokens."""
    prompts = prompt_ids[:3]
    pair = PDPair(connector="nixl", prefill={"connector_options": {"lease_s": 0.001}})
    found = pair.generate(prompts, GREEDY)
    pair.settle()
    assert pair.num_used_blocks == 0
    pair.close()
    oracle = Alone()
    assert [answer.token_ids for answer in found] == [one.token_ids for one in oracle.generate(prompts, GREEDY)]
    oracle.close()
    assert sum(answer.num_external_tokens for answer in found) == 0
