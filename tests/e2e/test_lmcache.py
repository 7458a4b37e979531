"""The real model through two engines with LMCache between them: token for token what one engine answers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from pd_pair import Alone, PDPair

from pdserve.protocol import SamplingParams

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lmcache") is None, reason="lmcache is not installed here: make test-lmcache runs these"
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2)


def test_tokens_are_those_of_one_engine_and_decode_computes_no_prompt(
    tmp_path: Path, prompt_ids: list[list[int]]
) -> None:
    prompts = [*prompt_ids[:10], *([7] * length for length in (15, 16, 17, 32))]
    oracle = Alone(enable_prefix_caching=False)
    expected = [oracle.generate([prompt], GREEDY)[0] for prompt in prompts]
    oracle.close()
    pair = PDPair(connector="lmcache", connector_options={"url": f"fs://{tmp_path}/kv"})
    found = pair.generate(prompts, GREEDY)
    pair.settle()
    assert pair.num_used_blocks == 0
    pair.close()
    for answer, one, prompt in zip(found, expected, prompts, strict=True):
        assert (answer.token_ids, answer.finish_reason) == (one.token_ids, one.finish_reason)
        assert answer.logprobs == one.logprobs
        if len(one.token_ids) > 1:  # else prefill's first token was the whole answer
            assert answer.num_external_tokens + answer.num_cached_tokens >= len(prompt)
