"""R1 to R5: what a lookup may promise, and what becomes of the promise."""

from __future__ import annotations

from pdserve.connectors.testing.bench import Bench
from pdserve.connectors.testing.check import TRANSFER, Need, check, collect_checks

STORE = (*TRANSFER, Need.STORE)


@check("R1")
def counts_are_beyond_local(bench: Bench) -> None:
    """With more and more of a prompt local, the answer shrinks by as much."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    size = bench.block_size
    prompt = bench.make_prompt(4 * size + 1)
    params = bench.hand_over(producer, prompt)
    request_id = bench.submit(consumer, prompt, params).request_id
    whole = bench.look_up(consumer, request_id)
    for num_local in range(0, 4 * size + 1, size):
        found = bench.look_up(consumer, request_id, num_local)
        bench.require(
            found == max(whole - num_local, 0),
            f"{whole} tokens are there; with {num_local} of them local the lookup says {found} instead of "
            f"{max(whole - num_local, 0)}",
        )
    consumer.admit(request_id, 0)


@check("R1")
def a_few_more_than_local_are_counted_alone(bench: Bench) -> None:
    """A block local, one and a half stored: the answer is half a block."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    size = bench.block_size
    prompt = bench.make_prompt(size + size // 2)
    params = bench.hand_over(producer, prompt)
    request_id = bench.submit(consumer, prompt, params).request_id
    whole = bench.look_up(consumer, request_id)
    found = bench.look_up(consumer, request_id, size)
    bench.require(
        found == max(whole - size, 0), f"{size} tokens local and {whole} there give {found} beyond the local ones"
    )
    consumer.admit(request_id, 0)


@check("R1")
def local_tokens_are_left_alone(bench: Bench) -> None:
    """A load behind local tokens fills the rest and writes nowhere else."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    size = bench.block_size
    prompt = bench.make_prompt(3 * size + 2)
    for num_local in (size, 2 * size, 3 * size):
        params = bench.hand_over(producer, prompt)
        request_id, num_tokens = bench.start_load(consumer, prompt, params, num_local_tokens=num_local)
        good = bench.wait_for_load(consumer, request_id) if num_tokens else 0
        bench.require(good == num_tokens, f"behind {num_local} local tokens {good} of {num_tokens} tokens arrived")
        consumer.finish(request_id)


@check("R1", needs=(Need.LOAD,))
def nothing_is_beyond_the_prompt(bench: Bench) -> None:
    """When local tokens cover the prompt, or more than it, there is nothing to load."""
    consumer = bench.build_consumer()
    prompt = bench.make_prompt(2 * bench.block_size)
    request_id = bench.submit(consumer, prompt, None).request_id
    for num_local in (len(prompt), len(prompt) + bench.block_size):
        found = bench.look_up(consumer, request_id, num_local)
        bench.require(
            found == 0, f"{num_local} tokens are local, the prompt has {len(prompt)}; the lookup says {found}"
        )


@check("R2")
def a_whole_prompt_travels(bench: Bench) -> None:
    """Prompts of every length around a block arrive as a whole."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    size = bench.block_size
    for family, length in enumerate((1, size - 1, size, size + 1, 2 * size, 4 * size + 1)):
        prompt = bench.make_prompt(length, family)
        params = bench.hand_over(producer, prompt)
        bench.require(all(producer.sent.values()), f"a prompt of {length} tokens was not saved whole")
        found = bench.fetch(consumer, prompt, params)
        bench.require(found == length, f"{found} of {length} tokens arrived")


@check("R2")
def a_whole_prompt_less_its_last_token(bench: Bench) -> None:
    """An engine that has to compute one token takes one less than promised; the load fits itself to that."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    size = bench.block_size
    for family, length in enumerate((size, 3 * size, 3 * size + 1)):
        prompt = bench.make_prompt(length, family)
        params = bench.hand_over(producer, prompt)
        request_id = bench.submit(consumer, prompt, params).request_id
        promised = bench.look_up(consumer, request_id)
        bench.require(promised == length, f"{promised} of {length} tokens are promised")
        consumer.admit(request_id, promised - 1)
        good = bench.wait_for_load(consumer, request_id)
        bench.require(good == length - 1, f"{good} tokens arrived, {length - 1} were asked for")
        consumer.finish(request_id)


@check("R3")
def a_lookup_changes_nothing(bench: Bench) -> None:
    """Asked many times, also for other requests in between, a lookup gives one answer and starts no load."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt = bench.make_prompt(4 * bench.block_size + 1)
    params = bench.hand_over(producer, prompt)
    first = bench.submit(consumer, prompt, params).request_id
    other = bench.submit(consumer, bench.make_prompt(3 * bench.block_size, family=1), None).request_id
    answers = set()
    for _ in range(5):
        answers.add(bench.look_up(consumer, first))
        bench.look_up(consumer, other)
        consumer.step()
    bench.require(len(answers) == 1, f"one question was answered with {sorted(answers)}")
    bench.require(not consumer.received, "a load was started that no allocation asked for")


@check("R3")
def allocation_may_fail_many_times(bench: Bench) -> None:
    """Lookups whose allocation failed leave nothing behind; the one that succeeds loads everything, once."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt = bench.make_prompt(3 * bench.block_size + 1)
    params = bench.hand_over(producer, prompt)
    request_id = bench.submit(consumer, prompt, params).request_id
    for _ in range(4):
        promised = bench.look_up(consumer, request_id)
        consumer.step()
    consumer.admit(request_id, promised)
    good = bench.wait_for_load(consumer, request_id) if promised else 0
    bench.require(good == promised, f"{good} of {promised} tokens arrived after three failed allocations")
    bench.pass_steps()


@check("R3")
def a_lookup_does_not_decide_where_a_load_begins(bench: Bench) -> None:
    """Lookups with other numbers of local tokens come in between; the load goes where the allocation says."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    size = bench.block_size
    prompt = bench.make_prompt(3 * size + 1)
    bench.fetch(consumer, prompt, bench.hand_over(producer, prompt))
    params = bench.hand_over(producer, prompt)
    request_id = bench.submit(consumer, prompt, params).request_id
    promised = bench.look_up(consumer, request_id)
    bench.look_up(consumer, request_id, 2 * size)
    with bench.blaming(covers_garbage=True):
        consumer.admit(request_id, promised)
        good = bench.wait_for_load(consumer, request_id) if promised else 0
    bench.require(good == promised, f"{good} of {promised} tokens arrived after a lookup behind {2 * size} local ones")


@check("R4")
def nothing_is_promised_that_nobody_saved(bench: Bench) -> None:
    """A prompt that shares its beginning with a saved one is promised that beginning at most."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt = bench.make_prompt(3 * bench.block_size)
    bench.hand_over(producer, prompt)
    stranger = bench.make_prompt(3 * bench.block_size, family=5)
    request_id = bench.submit(consumer, stranger, None).request_id
    bench.require(bench.look_up(consumer, request_id) == 0, "KV of a prompt that nobody computed is promised")
    fork = [*prompt[: bench.block_size], *stranger[bench.block_size :]]
    bench.require(bench.fetch(consumer, fork, None) <= bench.block_size, "more than the shared beginning is promised")


@check("R4")
def an_unused_promise_harms_nobody(bench: Bench) -> None:
    """The engine may take none of what was promised; then no load runs and none is reported."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt = bench.make_prompt(2 * bench.block_size + 1)
    params = bench.hand_over(producer, prompt)
    request_id = bench.submit(consumer, prompt, params).request_id
    bench.look_up(consumer, request_id)
    consumer.admit(request_id, 0)
    consumer.step({request_id: len(prompt)})
    bench.pass_steps()


@check("R4", needs=STORE)
def a_run_ends_at_the_first_hole(bench: Bench) -> None:
    """With a block gone in the middle, what is promised ends before it, or comes all the same from another tier."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    size = bench.block_size
    prompt = bench.make_prompt(4 * size)
    bench.hand_over(producer, prompt)
    bench.blocks.delete(bench.build_keys(producer, prompt)[2])
    request_id, promised = bench.start_load(consumer, prompt, None)
    with bench.blaming():
        good = bench.wait_for_load(consumer, request_id) if promised else 0
    bench.require(good == promised, f"{promised} tokens are promised, the third block of {size} is gone: {good} came")


@check("R4", needs=STORE)
def what_vanishes_after_the_lookup_is_reported(bench: Bench) -> None:
    """A block that goes between lookup and load is a failure that says how much is good, or comes from another tier."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    size = bench.block_size
    prompt = bench.make_prompt(4 * size + 1)
    for index in (2, 0, 4):
        bench.hand_over(producer, prompt)
        request_id, promised = bench.start_load(consumer, prompt, None)
        bench.require(promised == len(prompt), f"{promised} of {len(prompt)} tokens are promised", "R2")
        bench.blocks.delete(bench.build_keys(producer, prompt)[index])
        with bench.blaming():
            good = bench.wait_for_load(consumer, request_id)
        is_exact = good <= index * size or good == len(prompt)
        bench.require(is_exact, f"block {index} is gone, but {good} tokens are said to be good")
        consumer.finish(request_id)


@check("R5")
def a_partial_block_is_for_its_own_prompt(bench: Bench) -> None:
    """A prompt that goes on where a stored one ends in a block, or ends earlier in it, gets whole blocks only."""
    producer, consumer = bench.build_producer(), bench.build_consumer()
    size = bench.block_size
    prompt = bench.make_prompt(2 * size + 2)
    bench.hand_over(producer, prompt)
    for other in ([*prompt, 3], [*prompt, 3, 4, 5, 6], prompt[:-1]):
        request_id, promised = bench.start_load(consumer, other, None)
        bench.require(promised <= 2 * size, f"{promised} tokens are promised of {len(other)}; {2 * size} are shared")
        with bench.blaming():
            if promised:
                bench.wait_for_load(consumer, request_id)
        consumer.finish(request_id)


CHECKS = collect_checks(globals())
