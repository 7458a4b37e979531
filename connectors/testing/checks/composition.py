"""R17: connectors side by side in one engine."""

from __future__ import annotations

from pdserve.connectors.testing.bench import Bench
from pdserve.connectors.testing.check import TRANSFER, Need, check, collect_checks

COMPOSED = (*TRANSFER, Need.COMPOSE)


@check("R17", needs=COMPOSED)
def each_transfer_ends_once_for_the_engine(bench: Bench) -> None:
    """However many children save a prompt, the engine hears of one send, and of one load at the consumer."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    for family in range(5):
        prompt = bench.make_prompt(3 * bench.block_size + 1, family)
        name = bench.make_name()
        with bench.blaming():
            params = bench.hand_over(producer, prompt, name=name)
            found = bench.fetch(consumer, prompt, params)
            bench.wait_for_send(producer, name)
        bench.require(found == len(prompt), f"{found} of {len(prompt)} tokens arrived")
    bench.pass_steps()
    bench.require(producer.num_used_blocks == 0, f"{producer.num_used_blocks} blocks stay in use")


@check("R17", needs=COMPOSED)
def an_abort_reaches_every_child(bench: Bench) -> None:
    """Requests that are aborted at both ends leave no child waiting."""
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


CHECKS = collect_checks(globals())
