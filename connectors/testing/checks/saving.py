"""R6, R7, R10 and R15: what is saved, when, and what is never."""

from __future__ import annotations

from pdserve.connectors.testing.bench import Bench
from pdserve.connectors.testing.check import TRANSFER, Need, check, collect_checks
from pdserve.connectors.testing.harness import EngineHarness

STORE = (*TRANSFER, Need.STORE)
DIRECT = (*TRANSFER, Need.DIRECT)


@check("R6")
def every_chunk_arrives(bench: Bench) -> None:
    """However a prompt is cut into chunks, all of it arrives."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    size = bench.block_size
    for family, chunk in enumerate((1, size - 1, size, size + 1, 2 * size, 3 * size + 1)):
        prompt = bench.make_prompt(4 * size + 1, family)
        with bench.blaming():
            params = bench.hand_over(producer, prompt, chunk=chunk)
            found = bench.fetch(consumer, prompt, params)
        bench.require(found == len(prompt), f"{found} of {len(prompt)} tokens arrived, computed in chunks of {chunk}")


@check("R6", needs=STORE)
def a_claim_covers_what_is_saved(bench: Bench) -> None:
    """While a prompt is being computed, another engine is promised what is computed at most, and gets it."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    size = bench.block_size
    prompt = bench.make_prompt(4 * size)
    request_id = bench.make_name()
    producer.submit(request_id, prompt)
    producer.admit(request_id, 0)
    num_computed = 0
    with bench.blaming():
        for num_tokens in (size + 2, size - 1, 1, 2 * size - 2):
            producer.step({request_id: num_tokens})
            num_computed += num_tokens
            bench.pass_steps(5)
            found = bench.fetch(consumer, prompt, None)
            bench.require(found <= num_computed, f"{found} tokens are promised, {num_computed} are computed")
        producer.finish(request_id)


@check("R6", needs=STORE)
def prefix_hits_are_saved_too(bench: Bench) -> None:
    """Blocks that the producer had already count as its own: the store may have lost them since."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    size = bench.block_size
    prompt = bench.make_prompt(3 * size + 1)
    request_id = bench.make_name()
    producer.submit(request_id, prompt)
    producer.admit(request_id, 0, num_local_tokens=3 * size)
    producer.step({request_id: 1})
    decision = producer.finish(request_id, handoff=True)
    if decision.announce_when_sent:
        bench.wait_for_send(producer, request_id)
    found = bench.fetch(consumer, prompt, decision.kv_transfer_params)
    bench.require(found == len(prompt), f"{found} of {len(prompt)} tokens arrived; the rest was a hit at the producer")


@check("R7", needs=STORE)
def a_failed_forward_pass_saves_nothing(bench: Bench) -> None:
    """A step whose forward pass fails has no `wait_for_save`; its blocks are not saved later either."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt = bench.make_prompt(3 * bench.block_size)
    request_id = bench.make_name()
    producer.submit(request_id, prompt)
    producer.admit(request_id, 0)
    producer.step({request_id: len(prompt)}, forward_fails=True)
    producer.finish(request_id)
    other = bench.make_prompt(bench.block_size, family=1)
    with bench.blaming(covers_garbage=True):
        bench.hand_over(producer, other)
        bench.pass_steps(5)
        found = bench.fetch(consumer, prompt, None)
    bench.require(found == 0, f"{found} tokens are there whose forward pass failed")


@check("R7")
def admitted_is_not_computed(bench: Bench) -> None:
    """A request that has blocks but never ran offers nothing."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt = bench.make_prompt(3 * bench.block_size)
    request_id = bench.make_name()
    producer.submit(request_id, prompt)
    producer.admit(request_id, 0)
    bench.pass_steps(3)
    decision = producer.finish(request_id)
    with bench.blaming():
        bench.pass_steps(3)
        found = bench.fetch(consumer, prompt, decision.kv_transfer_params)
    bench.require(found == 0, f"{found} tokens are there that were never computed")


@check("R10", needs=(Need.SAVE,))
def a_registered_send_is_reported_once(bench: Bench) -> None:
    """A hand-off that announces a report gets one, and no second one later."""
    producer = bench.build_producer()
    request_id = bench.make_name()
    decision = producer.prefill(request_id, bench.make_prompt(2 * bench.block_size + 1))
    bench.require(decision.kv_transfer_params is not None, "a hand-off was computed, but nothing is offered")
    if decision.announce_when_sent and not decision.hold_blocks:
        bench.wait_for_send(producer, request_id)
    bench.pass_steps()


@check("R10", needs=STORE)
def what_is_stored_already_is_reported_too(bench: Bench) -> None:
    """A prompt whose every key is there is sent at once, and reported."""
    producer, other = bench.build_producer(), bench.build_producer("other")
    prompt = bench.make_prompt(3 * bench.block_size + 1)
    for engine, chunk in ((producer, None), (producer, 3), (other, None)):
        request_id = bench.make_name()
        decision = engine.prefill(request_id, prompt, chunk=chunk)
        if decision.expects_sent:
            bench.require(bench.wait_for_send(engine, request_id), "a stored prompt was reported as not saved")
    bench.pass_steps(5)


@check("R10", needs=STORE)
def two_sends_of_one_prompt_are_both_reported(bench: Bench) -> None:
    """Two requests with equal prompts in one step both end."""
    producer = bench.build_producer()
    prompt = bench.make_prompt(3 * bench.block_size + 1)
    names = [bench.make_name(), bench.make_name()]
    for name in names:
        producer.submit(name, prompt)
        producer.admit(name, 0)
    producer.step(dict.fromkeys(names, len(prompt)))
    decisions = {name: producer.finish(name, handoff=True) for name in names}
    for name, decision in decisions.items():
        if decision.expects_sent:
            bench.require(bench.wait_for_send(producer, name), f"{name} was reported as not saved")
    bench.pass_steps(5)


@check("R10", needs=DIRECT)
def held_blocks_come_back_when_they_are_fetched(bench: Bench) -> None:
    """The producer keeps a prompt's blocks until the consumer has them, and no longer."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt = bench.make_prompt(3 * bench.block_size + 1)
    request_id = bench.make_name()
    params = bench.hand_over(producer, prompt, name=request_id)
    bench.pass_steps(5)
    bench.require(request_id not in producer.sent, "the blocks were reported sent before anybody came for them")
    found = bench.fetch(consumer, prompt, params)
    bench.require(found == len(prompt), f"{found} of {len(prompt)} tokens arrived")
    bench.wait_for_send(producer, request_id)
    bench.require(producer.num_used_blocks == 0, f"{producer.num_used_blocks} blocks are still in use")
    bench.pass_steps(5)


@check("R15", needs=STORE)
def answer_tokens_stay_in_the_engine(bench: Bench) -> None:
    """Tokens computed behind the prompt, sampled or drafted, are not found by a prompt that contains them."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    size = bench.block_size
    prompt, answer = bench.make_prompt(size + 2), bench.make_prompt(2 * size, family=1)
    request_id = bench.make_name()
    producer.submit(request_id, prompt)
    producer.admit(request_id, 0)
    producer.step({request_id: len(prompt)})
    producer.generate(request_id, answer)
    producer.finish(request_id)
    bench.pass_steps(10)
    with bench.blaming():
        found = bench.fetch(consumer, [*prompt, *answer], None)
    bench.require(found <= size, f"{found} tokens are promised; the prompt alone has {size} in whole blocks")


@check("R15", needs=STORE)
def a_prompts_last_block_leaves_alone(bench: Bench) -> None:
    """What lies behind a prompt's last token in its block stays: what others left there, and the answer's beginning."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    size = bench.block_size
    for family, answer in enumerate(([], [11, 12])):
        prompt = bench.make_prompt(size + 1, family)
        request_id = bench.make_name()
        producer.submit(request_id, prompt)
        producer.admit(request_id, 0)
        producer.step({request_id: size})
        producer.generate(request_id, answer, num_before=1)
        producer.finish(request_id)
        bench.pass_steps(10)
        _require_clean_tail(bench, consumer, prompt)


def _require_clean_tail(bench: Bench, consumer: EngineHarness, prompt: list[int]) -> None:
    request_id = bench.submit(consumer, prompt, None).request_id
    promised = bench.look_up(consumer, request_id)
    block_ids = consumer.admit(request_id, promised)
    if promised <= bench.block_size:
        return
    bench.wait_for_load(consumer, request_id)
    tail = range(len(prompt), bench.spec.num_blocks_for(len(prompt)) * bench.block_size)
    written = consumer.memory.find_written(block_ids, tail)
    bench.require(written is None, f"slot {written} came along; the prompt ends at {len(prompt)}")


CHECKS = collect_checks(globals())
