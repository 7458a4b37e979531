"""R12: worker halves of one engine report for themselves."""

from __future__ import annotations

from pdserve.connectors.testing.bench import Bench
from pdserve.connectors.testing.check import TRANSFER, Need, check, collect_checks
from pdserve.connectors.testing.rank_pair import RankPair
from pdserve.connectors.testing.violations import NotOfferedError

STORE = (*TRANSFER, Need.STORE)


@check("R12", needs=STORE)
def ranks_load_for_themselves(bench: Bench) -> None:
    """Two worker halves with equal shares of the heads both load the whole prompt into their own memory."""
    producer = bench.build_producer()
    pair = RankPair(bench)
    consumer = bench.build_consumer(wrap_worker=pair.add_first)
    prompt = bench.make_prompt(3 * bench.block_size + 1)
    bench.hand_over(producer, prompt)
    with bench.blaming():
        request_id, promised = bench.start_load(consumer, prompt, None)
        good = bench.wait_for_load(consumer, request_id) if promised else 0
    bench.require(good == len(prompt), f"two ranks together got {good} of {len(prompt)} tokens")
    pair.require_exact(consumer, request_id, prompt, good)


@check("R12", needs=STORE)
def ranks_that_disagree_take_the_minimum(bench: Bench) -> None:
    """A block goes after the first rank has loaded it: the second reports less, and that much both have."""
    producer = bench.build_producer()
    pair = RankPair(bench)
    consumer = bench.build_consumer(wrap_worker=pair.add_first)
    size = bench.block_size
    prompt = bench.make_prompt(4 * size)
    bench.hand_over(producer, prompt)
    request_id = bench.submit(consumer, prompt, None).request_id
    promised = bench.look_up(consumer, request_id)
    bench.require(promised == len(prompt), f"{promised} of {len(prompt)} tokens are promised", "R2")
    if not consumer.lookup(request_id).is_async:
        raise NotOfferedError("a synchronous load is over before one rank could lose what another has")
    consumer.admit(request_id, promised)
    with bench.blaming():
        pair.hold_second()
        bench.run_until(lambda: request_id in pair.reported_by_first, "the first rank's load never ended", "R12")
        bench.blocks.delete(bench.build_keys(producer, prompt)[2])
        pair.let_second_go()
        good = bench.wait_for_load(consumer, request_id)
    pair.require_exact(consumer, request_id, prompt, good, rule="R4" if good > 2 * size else "R12")


CHECKS = collect_checks(globals())
