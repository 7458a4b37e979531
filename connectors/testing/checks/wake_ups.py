"""R20, where nobody looks: an engine that sleeps until the connector wakes it."""

from __future__ import annotations

from collections.abc import Callable

from pdserve.connectors.testing.bench import Bench
from pdserve.connectors.testing.check import TRANSFER, Need, check, collect_checks
from pdserve.connectors.testing.harness import EngineHarness


@check("R20", needs=(*TRANSFER, Need.WAKES))
def every_end_wakes_the_engine(bench: Bench) -> None:
    """Engines that step only when they are woken hear of every load's and every sending's end."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt = bench.make_prompt(20 * bench.block_size + 1)
    name = bench.make_name()
    decision = producer.prefill(name, prompt)
    if decision.expects_sent and not decision.hold_blocks:
        _sleep_until(bench, producer, lambda: name in producer.sent, "a sending")
    producer.step()  # an engine's next one, in which the worker half hears what is held
    request_id, promised = bench.start_load(consumer, prompt, decision.kv_transfer_params)
    bench.require(promised == len(prompt), f"{promised} of {len(prompt)} tokens are promised", "R2")
    _sleep_until(bench, consumer, lambda: request_id in consumer.received, "a load")
    if decision.hold_blocks:
        consumer.step()
        _sleep_until(bench, producer, lambda: name in producer.sent, "a sending")


def _sleep_until(bench: Bench, engine: EngineHarness, has_ended: Callable[[], bool], what: str) -> None:
    """One step, which may start something, and then none but those that the connector asks for."""
    engine.step()
    while not has_ended():
        was_woken = engine.woken.wait(bench.patience.timeout_s)
        engine.woken.clear()
        engine.step()
        if not was_woken:
            bench.patience.note_hang()
            # It may have come just now, by chance.
            bench.require(engine.woken.is_set(), f"{what} ended, or stands still, and the engine was not woken")


CHECKS = collect_checks(globals())
