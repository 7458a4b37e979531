"""R12: worker halves of one engine, each with its share of the heads and layers, report for themselves."""

from __future__ import annotations

from pdserve.connectors.testing.bench import Bench
from pdserve.connectors.testing.check import TRANSFER, Need, check, collect_checks
from pdserve.connectors.testing.harness import EngineHarness
from pdserve.connectors.testing.violations import NotOfferedError

RANKS = (*TRANSFER, Need.RANKS)
_TWO = (2, 1)


@check("R12", needs=RANKS)
def every_rank_has_its_own_share(bench: Bench) -> None:
    """Ranks that share the heads, the layers or both save and load a whole prompt, each its own part of every block."""
    for family, parallel in enumerate((_TWO, (1, 2), (2, 2))):
        producer, consumer = bench.build_producer(parallel=parallel), bench.build_consumer(parallel=parallel)
        prompt = bench.make_prompt(3 * bench.block_size + 1, family)
        with bench.blaming(covers_garbage=True):
            found = bench.fetch(consumer, prompt, bench.hand_over(producer, prompt, chunk=bench.block_size + 1))
        bench.require(found == len(prompt), f"{parallel} ranks together got {found} of {len(prompt)} tokens")


@check("R12", needs=RANKS)
def a_late_rank_gets_its_share(bench: Bench) -> None:
    """One rank has loaded long before the other begins: the load ends with the last, whose KV is still there."""
    producer, consumer = bench.build_producer(parallel=_TWO), bench.build_consumer(parallel=_TWO)
    prompt = bench.make_prompt(3 * bench.block_size + 1)
    params = bench.hand_over(producer, prompt)
    request_id = bench.submit(consumer, prompt, params).request_id
    promised = bench.look_up(consumer, request_id)
    bench.require(promised == len(prompt), f"{promised} of {len(prompt)} tokens are promised", "R2")
    _require_async(consumer, request_id)
    consumer.admit(request_id, promised)
    with bench.blaming(covers_garbage=True):
        consumer.ranks.hold(1)
        _wait_for_rank(bench, consumer, 0, request_id)
        bench.pass_steps()
        consumer.ranks.let_go(1)
        good = bench.wait_for_load(consumer, request_id)
    bench.require(good == len(prompt), f"with a rank that is late {good} of {len(prompt)} tokens arrived")


@check("R12", needs=(*RANKS, Need.STORE))
def ranks_that_disagree_take_the_minimum(bench: Bench) -> None:
    """A block goes, of all ranks or of one that is late: no rank claims what it has not, whatever the others have."""
    producer, consumer = bench.build_producer(parallel=_TWO), bench.build_consumer(parallel=_TWO)
    size, ranks = bench.block_size, producer.context.rank.all_ranks
    for family, losers in enumerate((ranks, ranks[1:], ranks[:1])):
        prompt = bench.make_prompt(4 * size, family)
        bench.hand_over(producer, prompt)
        request_id = bench.submit(consumer, prompt, None).request_id
        promised = bench.look_up(consumer, request_id)
        bench.require(promised == len(prompt), f"{promised} of {len(prompt)} tokens are promised", "R2")
        _require_async(consumer, request_id)
        consumer.admit(request_id, promised)
        for rank in losers:
            consumer.ranks.hold(rank.index)
        with bench.blaming():
            bench.step_all()
            for rank in ranks:
                if rank not in losers:
                    _wait_for_rank(bench, consumer, rank.index, request_id)
            for rank in losers:
                bench.target.get_share(rank).delete(bench.build_keys(producer, prompt)[2])
                consumer.ranks.let_go(rank.index)
            good = bench.wait_for_load(consumer, request_id)
        bench.require(good <= 2 * size, f"{good} tokens are said to be good; {len(losers)} of 2 ranks have {2 * size}")


def _wait_for_rank(bench: Bench, consumer: EngineHarness, rank: int, request_id: str) -> None:
    message = f"rank {rank} never reported its load, while the other stood still"
    bench.run_until(lambda: consumer.ranks.has_reported(rank, request_id), message, "R12")


def _require_async(consumer: EngineHarness, request_id: str) -> None:
    if not consumer.lookup(request_id).is_async:
        raise NotOfferedError("a synchronous load is over before one rank could lose what another has")


CHECKS = collect_checks(globals())
