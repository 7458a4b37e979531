"""R8, R9, R11 and R20: requests that are preempted, aborted or fail, and transfers that must end all the same."""

from __future__ import annotations

from pdserve.connectors.testing.bench import Bench
from pdserve.connectors.testing.check import TRANSFER, Level, Need, check, collect_checks
from pdserve.connectors.testing.faults.messages import delay_reports, repeat_messages

STORE = (*TRANSFER, Need.STORE)
DIRECT = (*TRANSFER, Need.DIRECT)


@check("R8")
def preempted_and_resumed(bench: Bench) -> None:
    """A prompt whose blocks were taken half way is computed again in others, and all of it arrives."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    size = bench.block_size
    prompt = bench.make_prompt(4 * size + 1)
    request_id = bench.make_name()
    producer.submit(request_id, prompt)
    producer.admit(request_id, 0)
    producer.step({request_id: 2 * size})
    producer.step(preempted=[request_id])
    producer.lookup(request_id)
    producer.admit(request_id, 0)
    producer.step({request_id: len(prompt)})
    with bench.blaming():
        decision = producer.finish(request_id, handoff=True)
        if decision.announce_when_sent:
            bench.wait_for_send(producer, request_id)
        found = bench.fetch(consumer, prompt, decision.kv_transfer_params)
    bench.require(found == len(prompt), f"{found} of {len(prompt)} tokens arrived after a preemption")


@check("R8", needs=STORE)
def a_steps_blocks_may_be_overwritten_at_once(bench: Bench) -> None:
    """When a step ends, its blocks go to the next request; what was saved is what stood there before."""
    producer, consumer = bench.build_producer(num_blocks=6), bench.build_consumer()
    prompts = [bench.make_prompt(4 * bench.block_size, family) for family in range(5)]
    names = []
    for prompt in prompts:
        name = bench.make_name()
        producer.submit(name, prompt)
        producer.admit(name, 0)
        producer.step({name: len(prompt)})
        producer.step(preempted=[name])
        names.append(name)
    for name in names:
        producer.finish(name)
    bench.pass_steps(5)
    for prompt in prompts:
        bench.fetch(consumer, prompt, None)


@check("R8")
def a_one_shot_load_is_not_asked_for_twice(bench: Bench) -> None:
    """After its load a preempted request comes back without parameters: it is answered, and can be computed."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt = bench.make_prompt(3 * bench.block_size + 1)
    params = bench.hand_over(producer, prompt)
    request_id, promised = bench.start_load(consumer, prompt, params)
    if promised:
        bench.wait_for_load(consumer, request_id)
    consumer.step(preempted=[request_id])
    consumer.submit(request_id, prompt)
    found = bench.look_up(consumer, request_id)
    if bench.is_direct:
        bench.require(found == 0, f"{found} tokens are promised to a request whose transfer is spent")
    consumer.admit(request_id, 0)
    consumer.step({request_id: len(prompt)})


@check("R9")
def fifty_aborts_during_loads(bench: Bench) -> None:
    """However early a loading request is aborted, its load ends in one report, and the next one works."""
    producer, consumer = bench.build_producer(num_blocks=256), bench.build_consumer(num_blocks=256)
    prompt = bench.make_prompt(2 * bench.block_size + 1)
    for number in range(50):
        params = bench.hand_over(producer, prompt)
        request_id, promised = bench.start_load(consumer, prompt, params)
        for _ in range(number % 3):
            bench.step_all()
        consumer.finish(request_id)
        if number % 10 == 9:
            bench.run_until(lambda: not consumer.loading_request_ids, "a load was never reported", "R9")
        bench.require(promised > 0, f"transfer {number} promises nothing", "R2")
    bench.run_until(lambda: not consumer.loading_request_ids, "a load was never reported", "R9")
    bench.require(consumer.num_used_blocks == 0, f"{consumer.num_used_blocks} blocks stay in use")
    params = bench.hand_over(producer, prompt)
    found = bench.fetch(consumer, prompt, params)
    bench.require(found == len(prompt), f"{found} of {len(prompt)} tokens arrived after fifty aborts")


@check("R9")
def aborts_at_every_point_of_a_prefill(bench: Bench) -> None:
    """A producer's request that never ran, ran half, was preempted or ran whole can end without a hand-off."""
    producer = bench.build_producer()
    prompt = bench.make_prompt(3 * bench.block_size + 1)
    half = 2 * bench.block_size
    for steps, is_preempted in (([], False), ([half], False), ([half], True), ([half, len(prompt) - half], False)):
        request_id = bench.make_name()
        producer.submit(request_id, prompt)
        if steps:
            producer.admit(request_id, 0)
        for num_tokens in steps:
            producer.step({request_id: num_tokens})
        if is_preempted:
            producer.step(preempted=[request_id])
        producer.finish(request_id)
        bench.step_all()
    bench.run_until(lambda: producer.is_idle, "a report is owed for an aborted request", "R9")
    bench.require(producer.num_used_blocks == 0, f"{producer.num_used_blocks} blocks stay in use")


@check("R9", needs=(Need.LOAD,))
def a_request_that_never_ran_may_end(bench: Bench) -> None:
    """Looked up or not, allocated or not, a request may end."""
    consumer = bench.build_consumer()
    prompt = bench.make_prompt(2 * bench.block_size)
    never_asked = bench.submit(consumer, prompt, None).request_id
    consumer.finish(never_asked)
    asked = bench.submit(consumer, prompt, None).request_id
    bench.look_up(consumer, asked)
    consumer.finish(asked)
    allocated = bench.submit(consumer, prompt, None).request_id
    consumer.admit(allocated, bench.look_up(consumer, allocated))
    consumer.finish(allocated)
    bench.pass_steps(5)


@check("R9", needs=())
def unknown_ids_are_refused(bench: Bench) -> None:
    """A worker that is told of sends it does not know, or told twice, reports none of them."""
    producer = bench.build_producer()
    if bench.target.features.can_save:
        bench.hand_over(producer, bench.make_prompt(bench.block_size), name="known")
    for request_ids in (["never-seen"], ["never-seen"], ["never-seen", "nor-this"]):
        output = producer.worker.get_finished(request_ids)
        reported = (output.finished_sending | output.failed_sending).intersection(request_ids)
        bench.require(not reported, f"{sorted(reported)} was reported sent, but nobody sends it")
    if "known" in producer.sent:
        output = producer.worker.get_finished(["known"])
        bench.require("known" not in output.finished_sending, "a send was reported again when it was asked for again")
    bench.pass_steps(5)


@check("R9", level=Level.FAULTS)
def messages_that_come_twice_do_no_harm(bench: Bench) -> None:
    """A step's message delivered again starts nothing again: each load is reported once."""
    producer = bench.build_producer(wrap_worker=repeat_messages)
    consumer = bench.build_consumer(wrap_worker=repeat_messages)
    for family in range(3):
        prompt = bench.make_prompt(3 * bench.block_size + 1, family)
        found = bench.fetch(consumer, prompt, bench.hand_over(producer, prompt))
        bench.require(found in (0, len(prompt)), f"{found} of {len(prompt)} tokens arrived")
    bench.pass_steps()


@check("R9", level=Level.FAULTS)
def reports_that_come_late_do_no_harm(bench: Bench) -> None:
    """A worker's report reaches the scheduler half many steps later, also for requests that are gone by then."""
    producer = bench.build_producer(wrap_worker=delay_reports)
    consumer = bench.build_consumer(wrap_worker=delay_reports)
    for family in range(4):
        prompt = bench.make_prompt(3 * bench.block_size + 1, family)
        request_id, promised = bench.start_load(consumer, prompt, bench.hand_over(producer, prompt))
        if family % 2:
            consumer.finish(request_id)
        elif promised:
            bench.wait_for_load(consumer, request_id)
    bench.pass_steps()


@check("R11", needs=STORE, level=Level.FAULTS)
def a_failed_load_writes_no_more(bench: Bench) -> None:
    """When a load has failed, its blocks go to others at once; nothing of it may still be on its way."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt = bench.make_prompt(20 * bench.block_size)
    bench.hand_over(producer, prompt)
    for index in (0, 3, 19):
        request_id, promised = bench.start_load(consumer, prompt, None)
        bench.require(promised > 0, "nothing is promised", "R2")
        bench.blocks.delete(bench.build_keys(producer, prompt)[index])
        bench.wait_for_load(consumer, request_id)
        consumer.finish(request_id)
        other = bench.make_name()
        consumer.submit(other, bench.make_prompt(len(prompt), family=index + 1))
        consumer.admit(other, 0)
        with bench.blaming():
            consumer.step({other: len(prompt)})
            bench.pass_steps(10)
            consumer.finish(other)
        bench.hand_over(producer, prompt)


@check("R11", needs=STORE, level=Level.FAULTS)
def a_failure_waits_for_parts_that_run(bench: Bench) -> None:
    """While a part of a load is held back, the failure of another part is not reported."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt = bench.make_prompt(20 * bench.block_size)
    bench.hand_over(producer, prompt)
    request_id, promised = bench.start_load(consumer, prompt, None)
    bench.require(promised > 0, "nothing is promised", "R2")
    bench.blocks.delete(bench.build_keys(producer, prompt)[0])
    with bench.target.held_loads():
        bench.pass_steps()
        bench.require(request_id not in consumer.received, "the load was reported while a part of it still ran")
    bench.wait_for_load(consumer, request_id)


@check("R20")
def idle_steps_are_enough(bench: Bench) -> None:
    """Sends and loads end while no engine computes anything."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt = bench.make_prompt(4 * bench.block_size + 1)
    params = bench.hand_over(producer, prompt)
    found = bench.fetch(consumer, prompt, params)
    bench.require(found == len(prompt), f"{found} of {len(prompt)} tokens arrived")


@check("R20", needs=())
def many_idle_steps_do_nothing(bench: Bench) -> None:
    """Steps without tokens and without transfers change nothing and report nothing."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    bench.pass_steps(100)
    for engine in (producer, consumer):
        bench.require(not engine.sent and not engine.received, "an idle engine reported a transfer")


CHECKS = collect_checks(globals())
