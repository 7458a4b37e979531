"""R19: peers that go and come back, and links and stores that fail for a while."""

from __future__ import annotations

from pdserve.connectors.testing.bench import Bench
from pdserve.connectors.testing.check import TRANSFER, Level, Need, check, collect_checks
from pdserve.connectors.testing.checks.recovery import require_recovery
from pdserve.connectors.testing.faults.link import Damage
from pdserve.connectors.testing.faults.peer_process import PeerProcess


@check("R19")
def a_restarted_producer_works_and_its_past_does_not(bench: Bench) -> None:
    """After a restart old references fail or are still exact, and new ones work; the consumer goes on."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt, later = bench.make_prompt(3 * bench.block_size + 1), bench.make_prompt(2 * bench.block_size + 1, family=1)
    bench.fetch(consumer, prompt, bench.hand_over(producer, prompt))
    old = bench.hand_over(producer, prompt)
    bench.stop(producer)
    producer = bench.build_producer()
    offers = [bench.hand_over(producer, later) for _ in range(3)]
    with bench.blaming():
        found = bench.fetch(consumer, prompt, old)
        if bench.is_direct:
            bench.require(found == 0, f"{found} tokens came from a producer that is gone")
        new = bench.fetch(consumer, later, offers[-1])
    bench.require(new == len(later), f"{new} of {len(later)} tokens arrived from the restarted producer")


@check("R19")
def a_producer_that_is_gone_costs_its_own_requests_only(bench: Bench) -> None:
    """Loads from a dead producer end in time, before and after they began; those from others go on."""
    dead, alive, consumer = bench.build_producer("dead"), bench.build_producer("alive"), bench.build_consumer()
    prompts = [bench.make_prompt(3 * bench.block_size + 1, family) for family in range(3)]
    offers = [bench.hand_over(engine, prompt) for engine, prompt in zip((dead, dead, alive), prompts, strict=True)]
    request_id, promised = bench.start_load(consumer, prompts[0], offers[0])
    bench.stop(dead)
    with bench.blaming():
        if promised:
            bench.wait_for_load(consumer, request_id)
        bench.fetch(consumer, prompts[1], offers[1])
        found = bench.fetch(consumer, prompts[2], offers[2])
    bench.require(found == len(prompts[2]), f"{found} of {len(prompts[2])} tokens arrived from the one that lives")


@check("R19")
def a_restarted_consumer_works(bench: Bench) -> None:
    """A consumer that was replaced in the middle of a load finds the producer at work."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt = bench.make_prompt(3 * bench.block_size + 1)
    bench.start_load(consumer, prompt, bench.hand_over(producer, prompt))
    bench.stop(consumer)
    consumer = bench.build_consumer()
    with bench.blaming():
        found = bench.fetch(consumer, prompt, bench.hand_over(producer, prompt))
    bench.require(found == len(prompt), f"{found} of {len(prompt)} tokens arrived at the restarted consumer")


@check("R19", level=Level.FAULTS)
def a_killed_producer_is_a_failure_in_time(bench: Bench) -> None:
    """The producer's process is killed with KV on offer, and another one started: the old fails, the new works."""
    consumer = bench.build_consumer()
    prompt = bench.make_prompt(3 * bench.block_size + 1)
    with PeerProcess(bench, "peer") as peer:
        with bench.blaming("R2"):
            found = bench.fetch(consumer, prompt, peer.hand_over(prompt))
        bench.require(found == len(prompt), f"{found} of {len(prompt)} tokens arrived from another process", "R2")
        offer = peer.hand_over(bench.make_prompt(len(prompt), family=1))
        peer.kill()
    with bench.blaming():
        bench.fetch(consumer, bench.make_prompt(len(prompt), family=1), offer)
    with PeerProcess(bench, "peer") as peer:
        later = bench.make_prompt(len(prompt), family=2)
        with bench.blaming():
            found = bench.fetch(consumer, later, peer.hand_over(later))
    bench.require(found == len(prompt), f"{found} of {len(prompt)} tokens arrived from the restarted process")


@check("R19", level=Level.FAULTS)
def an_outage_costs_time_and_ends(bench: Bench) -> None:
    """While nothing can be reached, requests end without KV and in time; afterwards it works by itself."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt, other = bench.make_prompt(3 * bench.block_size + 1), bench.make_prompt(2 * bench.block_size, family=1)
    params = bench.hand_over(producer, prompt)
    request_id = bench.submit(consumer, prompt, params).request_id
    promised = bench.look_up(consumer, request_id)
    with bench.target.outage(), bench.blaming():
        consumer.admit(request_id, promised)
        if promised:
            bench.wait_for_load(consumer, request_id)
        consumer.finish(request_id)
        bench.hand_over(producer, other)
        bench.fetch(consumer, prompt, None)
    require_recovery(bench, producer, consumer, "an outage")


@check("R19", level=Level.FAULTS)
def a_bad_link_costs_time_and_ends(bench: Bench) -> None:
    """Slow, silent, cut, losing or repeating bytes: loads end in time, exact or failed; afterwards all is well."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    for number, damage in enumerate(Damage):
        prompt = bench.make_prompt(3 * bench.block_size + 1, number)
        params = bench.hand_over(producer, prompt)
        with bench.target.bad_link(damage), bench.blaming():
            bench.fetch(consumer, prompt, params)
        require_recovery(bench, producer, consumer, f"a link that {damage.value}")


@check("R10", needs=(*TRANSFER, Need.STORE), level=Level.FAULTS)
def a_full_store_is_a_reported_failure(bench: Bench) -> None:
    """What cannot be saved is reported as not saved; when there is room again, saving works again."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt = bench.make_prompt(3 * bench.block_size + 1)
    request_id = bench.make_name()
    with bench.target.full_medium():
        params = bench.hand_over(producer, prompt, name=request_id)
        found = bench.fetch(consumer, prompt, params)
        is_whole = producer.sent.get(request_id, params is not None)
        bench.require(not is_whole or found == len(prompt), f"saved whole, it is said, but {found} tokens are there")
    require_recovery(bench, producer, consumer, "the store was full")


CHECKS = collect_checks(globals())
