"""R18: producers that hold blocks for somebody, who may come late, wait in a queue, or never come.

Of a composition one part may hold blocks while another has a copy: a spent lease brings nothing, or that copy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from pdserve.connectors.testing.bench import Bench
from pdserve.connectors.testing.check import TRANSFER, Need, check, collect_checks
from pdserve.connectors.testing.harness import EngineHarness
from pdserve.protocol import KVTransferParams

HOLD = (*TRANSFER, Need.HOLD)
CANCEL = (*TRANSFER, Need.DIRECT, Need.CANCEL)
QUEUE = (*HOLD, Need.HEARS_OF_QUEUE)
_SHORT_LEASE_S = 0.3
_QUEUE_LEASE_S = 0.8
_NUM_QUEUE_LEASES = 2
_LONG_LEASE_S = 600.0
_HOUR_S = 3600.0


@check("R18", needs=HOLD)
def an_expired_hold_is_freed(bench: Bench) -> None:
    """Nobody comes: the producer's blocks are free when the lease ends, of every request."""
    producer = _build_producer(bench, _SHORT_LEASE_S)
    for family in range(4):
        _hold(bench, producer, bench.make_prompt(2 * bench.block_size + 1, family))
    _wait_for_expiry(bench, producer)


@check("R18", needs=HOLD)
def a_late_read_fails(bench: Bench) -> None:
    """Who comes after the lease's end gets nothing, whatever lies in the blocks by then."""
    producer, consumer = _build_producer(bench, _SHORT_LEASE_S), bench.build_consumer()
    prompt = bench.make_prompt(3 * bench.block_size + 1)
    params = _hold(bench, producer, prompt)
    _wait_for_expiry(bench, producer)
    with bench.blaming(covers_garbage=True):
        found = bench.fetch(consumer, prompt, params)
    _require_spent(bench, found)


@check("R18", needs=HOLD)
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
    _require_spent(bench, good)


@check("R18", needs=HOLD)
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


@check("R18", needs=CANCEL)
def a_cancelled_send_frees_its_blocks(bench: Bench) -> None:
    """The producer itself is told that nobody will come: it gives the blocks up at once, and only those."""
    producer, consumer = _build_producer(bench, _LONG_LEASE_S), bench.build_consumer()
    prompts = [bench.make_prompt(2 * bench.block_size + 1, family) for family in range(2)]
    names = [bench.make_name(), bench.make_name()]
    offers = [bench.hand_over(producer, prompt, name=name) for prompt, name in zip(prompts, names, strict=True)]
    bench.step_all()
    bench.require(producer.held_request_ids >= set(names), "a prompt on offer is not held for anybody", "R10")
    bench.cancel_send(producer, "never-seen")
    bench.cancel_send(producer, names[0])
    bench.run_until(lambda: names[0] in producer.sent, "a send that was cancelled stays held", "R18")
    bench.require(names[1] in producer.held_request_ids, "a hold was given up that nobody cancelled")
    with bench.blaming("R16", covers_garbage=True):
        found = bench.fetch(consumer, prompts[0], offers[0])
    bench.require(found == 0, f"a cancelled transfer brought {found} tokens", "R16")
    found = bench.fetch(consumer, prompts[1], offers[1])
    bench.require(found == len(prompts[1]), f"{found} tokens arrived of a transfer that was not cancelled")


@check("R18", needs=HOLD)
def a_full_local_hit_frees_the_producer(bench: Bench) -> None:
    """A consumer that has everything itself loads nothing, and the producer hears of that."""
    producer, consumer = _build_producer(bench, _LONG_LEASE_S), bench.build_consumer()
    prompt = bench.make_prompt(2 * bench.block_size)
    params = _hold(bench, producer, prompt)
    request_id = bench.submit(consumer, prompt, params).request_id
    bench.look_up(consumer, request_id, len(prompt))
    consumer.admit(request_id, 0, len(prompt))
    bench.run_until(lambda: not producer.owed_sends, "blocks that nobody needs stay held", "R18")


@check("R18", needs=HOLD)
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


@check("R18", needs=QUEUE)
def a_lease_lasts_as_long_as_the_queue(bench: Bench) -> None:
    """A request that waits for its turn longer than a lease finds its KV, and waits for it only while it lives."""
    producer, consumer = _build_producer(bench, _QUEUE_LEASE_S), bench.build_consumer()
    prompt = bench.make_prompt(3 * bench.block_size + 1)
    request_id = bench.submit(consumer, prompt, _hold(bench, producer, prompt)).request_id
    _pass_time(bench, _NUM_QUEUE_LEASES * _QUEUE_LEASE_S)
    bench.require(bool(producer.owed_sends), "the lease of a request that waits for its turn has ended")
    consumer.admit(request_id, bench.look_up(consumer, request_id))
    with bench.blaming():
        found = bench.wait_for_load(consumer, request_id)
    bench.require(found == len(prompt), f"{found} of {len(prompt)} tokens were there when the request's turn came")
    bench.submit(consumer, prompt, _hold(bench, producer, prompt))
    bench.pass_steps()
    bench.stop(consumer)
    _wait_for_expiry(bench, producer, _QUEUE_LEASE_S)


@check("R18", needs=QUEUE)
def a_queued_request_that_ends_frees_its_blocks(bench: Bench) -> None:
    """A request that is aborted while it waits for its turn lets the producer know, and keeps nothing any more."""
    producer, consumer = _build_producer(bench, _LONG_LEASE_S), bench.build_consumer()
    prompt = bench.make_prompt(2 * bench.block_size + 1)
    request_id = bench.submit(consumer, prompt, _hold(bench, producer, prompt)).request_id
    bench.pass_steps()
    consumer.finish(request_id)
    bench.run_until(lambda: not producer.owed_sends, "the blocks of a request that waited stay held", "R18")


def _build_producer(bench: Bench, lease_s: float, name: str = "producer") -> EngineHarness:
    return bench.build_producer(name, lease_s=lease_s)


def _hold(bench: Bench, producer: EngineHarness, prompt: list[int]) -> KVTransferParams | None:
    """Hand a prompt over and see that its blocks are held."""
    request_id = bench.make_name()
    params = bench.hand_over(producer, prompt, name=request_id)
    bench.step_all()
    bench.step_all()
    bench.require(request_id in producer.held_request_ids, "a prompt on offer is not held for anybody", "R10")
    return params


def _require_spent(bench: Bench, num_tokens: int) -> None:
    is_spent = num_tokens == 0 or bench.target.composes
    bench.require(is_spent, f"{num_tokens} tokens were loaded after the lease's end")


def _wait_for_expiry(bench: Bench, producer: EngineHarness, lease_s: float = _SHORT_LEASE_S) -> None:
    bench.run_until(
        lambda: not producer.owed_sends,
        "an expired hold was never given up",
        "R18",
        engines=[producer],
        extra_s=4 * lease_s,
    )
    bench.require(producer.num_used_blocks == 0, f"{producer.num_used_blocks} blocks stay in use")


def _pass_time(bench: Bench, seconds: float) -> None:
    """Idle steps of every engine for as long as this."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        bench.step_all()


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
