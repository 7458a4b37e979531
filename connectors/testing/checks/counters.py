"""R23: what a connector counts is what happened.

Counting is up to the connector: one that counts no load, or no save, is not held to how it would.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.connectors.testing.bench import Bench
from pdserve.connectors.testing.check import Level, check, collect_checks
from pdserve.connectors.testing.counters import copy_stats, get_growth
from pdserve.connectors.testing.harness import EngineHarness
from pdserve.connectors.testing.violations import NotDeclaredError, NotOfferedError

_NUM_BLOCKS = 5


@check("R23")
def loads_are_counted_as_they_arrive(bench: Bench) -> None:
    """Blocks that arrive are counted once, with their bytes; those that are local are not, and nothing failed."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt = _make_prompt(bench)
    for num_local_blocks in (0, 2):
        num_local = num_local_blocks * bench.block_size
        params = bench.hand_over(producer, prompt)
        before = copy_stats(consumer.stats)
        found = bench.fetch(consumer, prompt, params, num_local_tokens=num_local)
        bench.pass_steps(3)
        bench.require(found == len(prompt) - num_local, f"{found} of {len(prompt) - num_local} tokens arrived", "R2")
        growth = get_growth(before, consumer.stats)
        _require_counts(growth.num_blocks_loaded, growth.num_bytes_loaded, "load")
        expected = _NUM_BLOCKS - num_local_blocks
        bench.require(
            growth.num_blocks_loaded == expected, f"{growth.num_blocks_loaded} blocks are counted, {expected} arrived"
        )
        _require_bytes(bench, growth.num_bytes_loaded, found, expected)
    _require_no_failures(bench, producer, consumer)


@check("R23")
def saves_are_counted_once(bench: Bench) -> None:
    """A prompt that was saved and fetched counts each of its blocks, once for each part that saves."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt = _make_prompt(bench)
    name = bench.make_name()
    params = bench.hand_over(producer, prompt, name=name, chunk=bench.block_size + 1)
    bench.fetch(consumer, prompt, params)
    _wait_for_saves(bench, producer, prompt)
    saved, num_bytes = producer.stats.num_blocks_saved, producer.stats.num_bytes_saved
    _require_counts(saved, num_bytes, "save")
    most = _NUM_BLOCKS * max(len(bench.target.parts), 1)
    bench.require(_NUM_BLOCKS <= saved <= most, f"{saved} blocks are counted as saved of a prompt of {_NUM_BLOCKS}")
    _require_bytes(bench, num_bytes, len(prompt), saved)
    _require_no_failures(bench, producer, consumer)


@check("R23")
def lookups_count_nothing(bench: Bench) -> None:
    """Questions that no load follows leave all counters as they are, whatever the answer was."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt = _make_prompt(bench)
    params = bench.hand_over(producer, prompt)
    request_id = bench.submit(consumer, prompt, params).request_id
    stranger = bench.submit(consumer, bench.make_prompt(len(prompt), family=1), None).request_id
    for num_local in (0, bench.block_size, 0):
        bench.look_up(consumer, request_id, num_local)
        bench.look_up(consumer, stranger, num_local)
        consumer.step()
    consumer.finish(stranger)
    bench.pass_steps(3)
    counted = copy_stats(consumer.stats)
    promised = bench.look_up(consumer, request_id)
    bench.require(promised == len(prompt), f"{promised} of {len(prompt)} tokens are promised", "R2")
    consumer.admit(request_id, promised)
    bench.wait_for_load(consumer, request_id)
    _require_counts(consumer.stats.num_blocks_loaded, consumer.stats.num_bytes_loaded, "load")
    moved = (counted.num_blocks_loaded, counted.num_bytes_loaded)
    bench.require(moved == (0, 0), f"{moved[0]} blocks and {moved[1]} bytes are counted before any load")
    bench.require(not counted.failures, f"lookups alone count failures: {counted.failures}")


@check("R23")
def a_failed_load_has_a_kind(bench: Bench) -> None:
    """What went before the load is a failure of some kind, and blocks are counted only as far as they came."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    _require_counting(bench, producer, consumer)
    prompt = _make_prompt(bench)
    params = bench.hand_over(producer, prompt)
    if bench.is_direct:
        bench.fetch(consumer, prompt, params)  # and once more below, with what is spent by then
    else:
        _wait_for_writes(bench, producer, prompt)
    request_id = bench.submit(consumer, prompt, params).request_id
    promised = bench.look_up(consumer, request_id)
    if not bench.is_direct:
        bench.blocks.delete(bench.build_keys(producer, prompt)[2])
    num_there = 0 if bench.is_direct else _NUM_BLOCKS - 1
    before = copy_stats(consumer.stats)
    consumer.admit(request_id, promised)
    good = bench.wait_for_load(consumer, request_id) if promised else 0
    if good == promised:
        raise NotOfferedError("nothing is promised that is gone, or it came all the same")
    bench.pass_steps(3)
    growth = get_growth(before, consumer.stats)
    bench.require(bool(growth.failures), "a load failed, and no failure is counted")
    num_counted = growth.num_blocks_loaded
    bench.require(num_counted <= num_there, f"{num_counted} blocks are counted, {num_there} were there")


@check("R23", level=Level.FAULTS)
def a_failed_save_has_a_kind(bench: Bench) -> None:
    """With a full store nothing is counted as saved that is not stored, and the send's failure has a kind."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    _require_counting(bench, producer, consumer)
    prompt, name = _make_prompt(bench), bench.make_name()
    before = copy_stats(producer.stats)
    with bench.target.full_medium():
        decision = producer.prefill(name, prompt)
        is_whole = not decision.expects_sent or bench.wait_for_send(producer, name)
        bench.pass_steps(3)
        num_stored = sum(bench.blocks.read(key) is not None for key in bench.build_keys(producer, prompt))
    growth = get_growth(before, producer.stats)
    most = num_stored * max(len(bench.target.parts), 1)
    saved = growth.num_blocks_saved
    bench.require(saved <= most, f"{saved} blocks are counted as saved, {num_stored} of {_NUM_BLOCKS} are stored")
    bench.require(is_whole or bool(growth.failures), "a send failed, and no failure is counted")


def _make_prompt(bench: Bench) -> list[int]:
    """Four full blocks and a partial one."""
    return bench.make_prompt((_NUM_BLOCKS - 1) * bench.block_size + 1)


def _require_counting(bench: Bench, producer: EngineHarness, consumer: EngineHarness) -> None:
    """One prompt travels, and leaves its marks."""
    prompt = bench.make_prompt(2 * bench.block_size, family=1)
    bench.fetch(consumer, prompt, bench.hand_over(producer, prompt))
    _wait_for_saves(bench, producer, prompt)
    _require_counts(consumer.stats.num_blocks_loaded, consumer.stats.num_bytes_loaded, "load")
    _require_counts(producer.stats.num_blocks_saved, producer.stats.num_bytes_saved, "save")


def _wait_for_saves(bench: Bench, producer: EngineHarness, prompt: Sequence[int]) -> None:
    """Until nobody writes or fetches what was handed over."""
    bench.run_until(lambda: producer.is_idle, "a send was never reported", "R10")
    _wait_for_writes(bench, producer, prompt)
    bench.pass_steps(3)


def _wait_for_writes(bench: Bench, producer: EngineHarness, prompt: Sequence[int]) -> None:
    """Until the store has it all, where we can look: of a composition's writes perhaps nobody is told."""
    if not bench.is_direct and bench.target.blocks is not None:
        keys = bench.build_keys(producer, prompt)
        bench.run_until(lambda: all(map(bench.target.is_saved, keys)), "a block was never saved", "R6")


def _require_counts(num_blocks: int, num_bytes: int, what: str) -> None:
    if not num_blocks and not num_bytes:
        raise NotDeclaredError(f"the connector counts no {what}")


def _require_bytes(bench: Bench, num_bytes: int, num_tokens: int, num_blocks: int) -> None:
    """Those of the tokens at least, those of whole blocks at most: a partial block may travel either way."""
    spec = bench.spec
    least, most = num_tokens * spec.block_bytes // spec.block_size, num_blocks * spec.block_bytes
    bench.require(least <= num_bytes <= most, f"{num_bytes} bytes are counted, for KV of {least} to {most} bytes")


def _require_no_failures(bench: Bench, *engines: EngineHarness) -> None:
    for engine in engines:
        failures = engine.stats.failures
        bench.require(not failures, f"everything went well, and {engine.context.role.value} counts {failures}")


CHECKS = collect_checks(globals())
