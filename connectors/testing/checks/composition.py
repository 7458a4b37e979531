"""R17: connectors side by side in one engine."""

from __future__ import annotations

from pdserve.connectors.testing.bench import Bench
from pdserve.connectors.testing.check import TRANSFER, Level, Need, check, collect_checks
from pdserve.connectors.testing.harness import EngineHarness
from pdserve.connectors.testing.target import ConformanceTarget, StoredBlocks
from pdserve.connectors.testing.violations import NotOfferedError

COMPOSED = (*TRANSFER, Need.COMPOSE)
COMPOSED_STORES = (*COMPOSED, Need.STORE)


@check("R17", needs=COMPOSED)
def each_transfer_ends_once_for_the_engine(bench: Bench) -> None:
    """However many parts save a prompt, the engine hears of one send at most, and of one load at the consumer."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    for family in range(5):
        prompt = bench.make_prompt(3 * bench.block_size + 1, family)
        name = bench.make_name()
        with bench.blaming():
            params = bench.hand_over(producer, prompt, name=name)
            found = bench.fetch(consumer, prompt, params)
            if name in producer.owed_sends:
                bench.wait_for_send(producer, name)
        bench.require(found == len(prompt), f"{found} of {len(prompt)} tokens arrived")
    bench.pass_steps()
    bench.require(producer.num_used_blocks == 0, f"{producer.num_used_blocks} blocks stay in use")


@check("R17", needs=COMPOSED)
def an_abort_reaches_every_child(bench: Bench) -> None:
    """Requests that are aborted at both ends leave no part waiting."""
    producer, consumer = bench.build_producer(num_blocks=256), bench.build_consumer(num_blocks=256)
    prompt = bench.make_prompt(3 * bench.block_size + 1)
    for number in range(10):
        params = bench.hand_over(producer, prompt)
        request_id, _ = bench.start_load(consumer, prompt, params)
        if number % 2:
            bench.step_all()
        consumer.finish(request_id)
    with bench.blaming():
        bench.run_until(lambda: consumer.is_idle, "a load was never reported", "R17")
    bench.require(consumer.num_used_blocks == 0, f"{consumer.num_used_blocks} blocks stay in use")


@check("R17", needs=(*COMPOSED, Need.CANCEL))
def a_cancelled_send_reaches_whoever_holds_blocks(bench: Bench) -> None:
    """Nobody will come for a hand-off: the part that holds its blocks hears of it, and the engine of one end."""
    producer = bench.build_producer()
    name = bench.make_name()
    decision = producer.prefill(name, bench.make_prompt(2 * bench.block_size + 1))
    if not decision.hold_blocks:
        raise NotOfferedError("no part holds blocks")
    bench.step_all()
    bench.cancel_send(producer, name)
    bench.run_until(lambda: name in producer.sent, "a send that was cancelled stays held", "R17")
    bench.pass_steps()
    bench.require(producer.num_used_blocks == 0, f"{producer.num_used_blocks} blocks stay in use")


@check("R17", needs=COMPOSED_STORES)
def a_send_has_ended_when_every_child_has_saved(bench: Bench) -> None:
    """What was reported sent lies in every part's store, not only in the quickest one's."""
    stores = _get_stores(bench)
    producer = bench.build_producer()
    for family, num_blocks in enumerate((1, 3, 12)):
        prompt = bench.make_prompt(num_blocks * bench.block_size, family)
        name = bench.make_name()
        decision = producer.prefill(name, prompt)
        if not decision.expects_sent:
            raise NotOfferedError("parameters of one part are good at once, so nobody waits for the others")
        bench.wait_for_send(producer, name)
        keys = bench.build_keys(producer, prompt)
        missing = [index for index, store in enumerate(stores) if any(store.read(key) is None for key in keys)]
        bench.require(not missing, f"reported sent, but part {missing} has not saved all {num_blocks} blocks")


@check("R17", needs=COMPOSED_STORES)
def what_one_child_loses_another_gives(bench: Bench) -> None:
    """A block goes from the part that promised it: the failure is reported, and the request is loaded by the next."""
    stores = _get_stores(bench)
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt = bench.make_prompt(3 * bench.block_size + 1)
    bench.hand_over(producer, prompt)
    keys = bench.build_keys(producer, prompt)
    bench.run_until(lambda: all(map(bench.target.is_saved, keys)), "a part never saved a block", "R17")
    request_id, promised = bench.start_load(consumer, prompt, None)
    bench.require(promised == len(prompt), f"{promised} of {len(prompt)} tokens are promised", "R2")
    stores[0].delete(keys[0])
    good = bench.wait_for_load(consumer, request_id)
    if good < len(prompt):
        good = _load_again(bench, consumer, request_id)
    bench.require(good == len(prompt), f"one part lost a block, and the others gave {good} of {len(prompt)} tokens")


@check("R17", needs=COMPOSED_STORES, level=Level.FAULTS)
def a_child_that_cannot_save_does_not_harm_the_others(bench: Bench) -> None:
    """Each part in turn is full: the hand-off is whole all the same, and is loaded from another."""
    if not bench.target.parts:
        raise NotOfferedError("the target does not let checks at its parts")
    consumer = bench.build_consumer()
    for family, part in enumerate(bench.target.parts):
        producer = bench.build_producer()  # a new one: the part that was full before may rest from its failures
        _require_whole_without(bench, producer, consumer, part, family)
        bench.stop(producer)


def _require_whole_without(
    bench: Bench, producer: EngineHarness, consumer: EngineHarness, part: ConformanceTarget, family: int
) -> None:
    prompt = bench.make_prompt(3 * bench.block_size + 1, family)
    name = bench.make_name()
    with part.full_medium():
        decision = producer.prefill(name, prompt)
        if decision.expects_sent:
            is_whole = bench.wait_for_send(producer, name)
            bench.require(is_whole, "the send failed because one part could not save")
        found = bench.fetch(consumer, prompt, decision.kv_transfer_params)
    bench.require(found == len(prompt), f"one part could not save, and {found} of {len(prompt)} tokens arrived")


def _load_again(bench: Bench, consumer: EngineHarness, request_id: str) -> int:
    """As an engine does after a failure: ask again, and load what there is."""
    consumer.step(preempted=[request_id])
    promised = bench.look_up(consumer, request_id)
    consumer.received.pop(request_id)
    consumer.admit(request_id, promised)
    return bench.wait_for_load(consumer, request_id) if promised else 0


def _get_stores(bench: Bench) -> list[StoredBlocks]:
    stores = [part.blocks for part in bench.target.parts if part.blocks is not None]
    if len(stores) < 2:
        raise NotOfferedError("the target does not let checks at the stores of its parts")
    return stores


CHECKS = collect_checks(globals())
