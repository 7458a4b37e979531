"""After damage has ended: traffic goes on until a transfer succeeds by itself."""

from __future__ import annotations

import itertools

from pdserve.connectors.testing.bench import Bench
from pdserve.connectors.testing.harness import EngineHarness

_FIRST_FAMILY = 100


def require_recovery(bench: Bench, producer: EngineHarness, consumer: EngineHarness, what: str) -> None:
    """Hand prompts over until one arrives.

    Args:
        bench: of the check; its rule is broken when none ever does.
        producer: hands over.
        consumer: fetches.
        what: the damage, for the message.
    """
    families = itertools.count(_FIRST_FAMILY)

    def works() -> bool:
        prompt = bench.make_prompt(2 * bench.block_size + 1, next(families))
        return bench.fetch(consumer, prompt, bench.hand_over(producer, prompt)) == len(prompt)

    bench.run_until(works, f"no transfer succeeds after {what}", bench.rule)
