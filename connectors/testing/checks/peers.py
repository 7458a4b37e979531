"""R18 and R19: producers that hold blocks for somebody, and peers that go and come back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from pdserve.connectors.testing.bench import Bench
from pdserve.connectors.testing.check import TRANSFER, Level, Need, check, collect_checks
from pdserve.connectors.testing.checks.recovery import require_recovery
from pdserve.connectors.testing.faults.link import Damage
from pdserve.connectors.testing.faults.peer_process import PeerProcess
from pdserve.connectors.testing.harness import EngineHarness
from pdserve.connectors.testing.violations import NotOfferedError
from pdserve.protocol import KVTransferParams

DIRECT = (*TRANSFER, Need.DIRECT)
_SHORT_LEASE_S = 0.3
_LONG_LEASE_S = 600.0
_HOUR_S = 3600.0


@check("R18", needs=DIRECT)
def an_expired_hold_is_freed(bench: Bench) -> None:
    """Nobody comes: the producer's blocks are free when the lease ends, of every request."""
    producer = _build_producer(bench, _SHORT_LEASE_S)
    for family in range(4):
        _hold(bench, producer, bench.make_prompt(2 * bench.block_size + 1, family))
    _wait_for_expiry(bench, producer)


@check("R18", needs=DIRECT)
def a_late_read_fails(bench: Bench) -> None:
    """Who comes after the lease's end gets nothing, whatever lies in the blocks by then."""
    producer, consumer = _build_producer(bench, _SHORT_LEASE_S), bench.build_consumer()
    prompt = bench.make_prompt(3 * bench.block_size + 1)
    params = _hold(bench, producer, prompt)
    _wait_for_expiry(bench, producer)
    with bench.blaming(covers_garbage=True):
        found = bench.fetch(consumer, prompt, params)
    bench.require(found == 0, f"{found} tokens were loaded after the lease's end")


@check("R18", needs=DIRECT)
def a_load_that_begins_too_late_fails(bench: Bench) -> None:
    """The lookup was in time, the load is not: a reported failure."""
    producer, consumer = _build_producer(bench, _SHORT_LEASE_S), bench.build_consumer()
    prompt = bench.make_prompt(3 * bench.block_size + 1)
    params = _hold(bench, producer, prompt)
    request_id = bench.submit(consumer, prompt, params).request_id
    promised = bench.look_up(consumer, request_id)
    _wait_for_expiry(bench, producer)  # the consumer stands still meanwhile, and renews nothing
    consumer.admit(request_id, promised)
    with bench.blaming(covers_garbage=True):
        good = bench.wait_for_load(consumer, request_id) if promised else 0
    bench.require(good == 0, f"{good} tokens were loaded after the lease's end")


@check("R18", needs=DIRECT)
def a_cancelled_request_frees_its_blocks(bench: Bench) -> None:
    """A consumer's request that ends before it loads lets the producer know, long before the lease ends."""
    producer, consumer = _build_producer(bench, _LONG_LEASE_S), bench.build_consumer()
    prompt = bench.make_prompt(2 * bench.block_size + 1)
    for asks in (False, True):
        params = _hold(bench, producer, prompt)
        request_id = bench.submit(consumer, prompt, params).request_id
        if asks:
            bench.look_up(consumer, request_id)
        consumer.finish(request_id)
        bench.run_until(lambda: not producer.owed_sends, "a cancelled request's blocks stay held", "R18")


@check("R18", needs=DIRECT)
def a_full_local_hit_frees_the_producer(bench: Bench) -> None:
    """A consumer that has everything itself loads nothing, and the producer hears of that."""
    producer, consumer = _build_producer(bench, _LONG_LEASE_S), bench.build_consumer()
    prompt = bench.make_prompt(2 * bench.block_size)
    params = _hold(bench, producer, prompt)
    request_id = bench.submit(consumer, prompt, params).request_id
    bench.look_up(consumer, request_id, len(prompt))
    consumer.admit(request_id, 0, len(prompt))
    bench.run_until(lambda: not producer.owed_sends, "blocks that nobody needs stay held", "R18")


@check("R18", needs=DIRECT)
def the_wall_clock_has_no_say(bench: Bench) -> None:
    """Somebody sets the clock by an hour, forward or back: holds stay, and leases still end."""
    producer, consumer = _build_producer(bench, _LONG_LEASE_S), bench.build_consumer()
    prompt = bench.make_prompt(2 * bench.block_size + 1)
    for hours in (1, -1):
        params = _hold(bench, producer, prompt)
        with _wall_clock_moved(hours * _HOUR_S), bench.blaming(covers_garbage=True):
            bench.pass_steps(5)
            bench.require(bool(producer.owed_sends), "a hold was given up when the wall clock moved")
            found = bench.fetch(consumer, prompt, params)
        bench.require(found == len(prompt), f"{found} of {len(prompt)} tokens arrived when the wall clock moved")
    short = _build_producer(bench, _SHORT_LEASE_S, "short")
    _hold(bench, short, prompt)
    with _wall_clock_moved(-_HOUR_S):
        _wait_for_expiry(bench, short)


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
        if not bench.target.features.is_store:
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


def _build_producer(bench: Bench, lease_s: float, name: str = "producer") -> EngineHarness:
    option = bench.target.lease_option
    if option is None:
        raise NotOfferedError("the target names no option for the length of a lease")
    return bench.build_producer(name, **{option: lease_s})


def _hold(bench: Bench, producer: EngineHarness, prompt: list[int]) -> KVTransferParams | None:
    """Hand a prompt over and see that its blocks are held."""
    request_id = bench.make_name()
    params = bench.hand_over(producer, prompt, name=request_id)
    bench.step_all()
    bench.step_all()
    bench.require(request_id in producer.held_request_ids, "a prompt on offer is not held for anybody", "R10")
    return params


def _wait_for_expiry(bench: Bench, producer: EngineHarness) -> None:
    bench.run_until(
        lambda: not producer.owed_sends,
        "an expired hold was never given up",
        "R18",
        engines=[producer],
        extra_s=4 * _SHORT_LEASE_S,
    )
    bench.require(producer.num_used_blocks == 0, f"{producer.num_used_blocks} blocks stay in use")


@contextmanager
def _wall_clock_moved(seconds: float) -> Iterator[None]:
    """Inside, the wall clock of this process shows another time; the monotonic one goes on."""
    real, real_ns = time.time, time.time_ns

    def shifted() -> float:
        return real() + seconds

    def shifted_ns() -> int:
        return real_ns() + int(seconds * 1e9)

    with mock.patch("time.time", shifted), mock.patch("time.time_ns", shifted_ns):
        yield


CHECKS = collect_checks(globals())
