"""The promise of `test_exactness` with int8 weights and int8 activations: the same bits in any company."""

from __future__ import annotations

from pathlib import Path

import pytest
from pd_pair import Alone, Answer, PDPair

from pdserve.protocol import SamplingParams

PARAMS = SamplingParams(temperature=0.9, seed=7, max_tokens=8, logprobs=2)
NUM_PROMPTS = 4


class Cases:
    """Some prompts, a long one among them, and what one engine answers to each alone and whole."""

    def __init__(self, quantization: str, prompts: list[list[int]]) -> None:
        self.quantization = quantization
        self.prompts = prompts
        oracle = Alone(quantization=quantization, enable_prefix_caching=False, max_num_batched_tokens=4096)
        self.expected = [oracle.generate([prompt], PARAMS)[0] for prompt in prompts]
        self.numerics = oracle.core.identity.numerics
        oracle.close()

    def assert_same(self, found: list[Answer]) -> None:
        for a, b in zip(found, self.expected, strict=True):
            assert (a.token_ids, a.finish_reason, a.logprobs) == (b.token_ids, b.finish_reason, b.logprobs)


@pytest.fixture(scope="module", params=["int8", "w8a8"])
def cases(request: pytest.FixtureRequest, prompt_ids: list[list[int]], long_ids: list[list[int]]) -> Cases:
    return Cases(request.param, [*prompt_ids[:NUM_PROMPTS], long_ids[0][:300]])


def test_prefill_decode_in_a_batch_and_in_chunks_equals_one_engine(cases: Cases, tmp_path: Path) -> None:
    options = {"connector": "shared_storage", "connector_options": {"path": str(tmp_path)}}
    pair = PDPair(quantization=cases.quantization, max_num_batched_tokens=64, **options)
    cases.assert_same(pair.generate(cases.prompts, PARAMS))
    pair.settle()
    pair.close()


def test_kv_of_other_weights_is_a_miss(cases: Cases, tmp_path: Path) -> None:
    """Engines that share a store but not their weights' precision: the decode engine computes for itself."""
    options = {"connector": "shared_storage", "connector_options": {"path": str(tmp_path)}}
    pair = PDPair(prefill={"quantization": "none"}, decode={"quantization": cases.quantization}, **options)
    found = pair.generate(cases.prompts[:2], PARAMS)
    assert [answer.num_external_tokens for answer in found] == [0, 0]
    pair.close()
