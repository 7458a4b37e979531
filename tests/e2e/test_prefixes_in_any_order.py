"""A context, a part of it and something longer, in every order: what is reused comes from the engines' own caches, from
the store, or half from each, and the answers are those of one engine that reuses nothing.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from pd_pair import Alone, PDPair

from pdserve.protocol import SamplingParams

BLOCK = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=2)
LENGTHS = (100, 50, 33, 64)
ORDERS = list(itertools.permutations(LENGTHS))[::5]
"""Five, in which each length comes first."""


def test_answers_do_not_depend_on_what_is_reused_and_from_where(tmp_path: Path) -> None:
    contexts = [[1000 + 37 * number + 11 * i % 997 for i in range(max(LENGTHS))] for number in range(len(ORDERS))]
    prompts = [[context[:length] for length in order] for context, order in zip(contexts, ORDERS, strict=True)]
    oracle = Alone(enable_prefix_caching=False)
    expected = [[oracle.generate([prompt], GREEDY)[0].token_ids for prompt in of_order] for of_order in prompts]
    oracle.close()
    pair = PDPair(connector="shared_storage", connector_options={"path": str(tmp_path)}, max_num_batched_tokens=32)
    answers = [[pair.generate([prompt], GREEDY)[0] for prompt in of_order] for of_order in prompts]
    pair.settle()
    assert pair.num_used_blocks == 0
    pair.close()
    assert [[answer.token_ids for answer in of_order] for of_order in answers] == expected
    for order, (first, *others) in zip(ORDERS, answers, strict=True):
        assert first.num_external_tokens == order[0], "nothing was handed over"
        assert all(0 < other.num_external_tokens < BLOCK * 4 for other in others), "own blocks were not used, or alone"
