"""A request's way, with every kind of loss at every moment: the tokens are always the same."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_instances import (
    BAD_REQUEST,
    DRAINING,
    ENGINE_ERROR,
    OVERLOADED,
    Bench,
    FakeInstance,
    Fault,
    build_bench,
    build_ready,
    collect,
    make_tokens,
    run,
)

from pdserve.errors import (
    EngineError,
    OverloadedError,
    RequestError,
    RequestTimeoutError,
    UnavailableError,
)
from pdserve.protocol import FinishReason, Role
from pdserve.router.config import HandoffSettings

PROMPT = (5, 6, 7)
EXPECTED = make_tokens(PROMPT, 3, 6)


def prefill(*faults: Fault | None, address: str = "p0", **fields: Any) -> FakeInstance:
    return FakeInstance(Role.PREFILL, address, list(faults), **fields)


def decode(*faults: Fault | None, address: str = "d0", **fields: Any) -> FakeInstance:
    return FakeInstance(Role.DECODE, address, list(faults), **fields)


def run_flow(
    prefill_pool: list[FakeInstance], decode_pool: list[FakeInstance], **sampling: Any
) -> tuple[list[int], list[Any], Bench]:
    async def main() -> tuple[list[int], list[Any], Bench]:
        async with build_bench(prefill_pool, decode_pool) as bench:
            tokens, batches = await collect(bench.build_flow(PROMPT, **sampling))
            return tokens, batches, bench

    result: tuple[list[int], list[Any], Bench] = run(main())
    return result


def test_handed_off_request_gives_the_first_token_by_prefill_and_the_rest_by_decode() -> None:
    p, d = prefill(cached_tokens=2), decode()
    tokens, batches, bench = run_flow([p], [d])
    assert tokens == EXPECTED
    assert batches[-1].finish_reason is FinishReason.LENGTH
    assert [batch.num_cached_tokens for batch in batches] == [2, 0, 0, 0, 0, 0]
    (first,), (second,) = p.messages, d.messages
    assert (first.handoff, first.output_token_ids, first.kv_transfer_params) == (True, [], None)
    assert (second.handoff, second.output_token_ids) == (False, EXPECTED[:1])
    assert second.kv_transfer_params is not None
    assert second.kv_transfer_params.transfer_id == first.request_id != second.request_id
    assert first.sampling == second.sampling
    assert bench.get_metric("handoffs_total") == 1
    assert bench.get_metric("decode_recomputed_prompts_total") == 0
    assert p.aborted == d.aborted == []


def test_no_prefill_pool_sends_the_whole_request_to_decode() -> None:
    d = decode(cached_tokens=1)
    tokens, batches, bench = run_flow([], [d])
    assert tokens == EXPECTED
    assert not d.messages[0].handoff
    assert batches[0].num_cached_tokens == 1
    assert bench.get_metric("colocated_fallbacks_total") == 0


def test_short_prompt_is_not_handed_off() -> None:
    p, d = prefill(), decode()

    async def main() -> None:
        async with build_bench([p], [d]) as bench:
            settings = HandoffSettings(disaggregation_threshold_tokens=4)
            assert (await collect(bench.build_flow(PROMPT, settings=settings)))[0] == EXPECTED
            assert p.messages == []
            assert (await collect(bench.build_flow((8, *PROMPT), settings=settings)))[0]
            assert len(p.messages) == 1

    run(main())


def test_prompt_whose_prefix_a_decode_instance_has_goes_there_whole() -> None:
    p, decodes = prefill(), [decode(address="d0"), decode(address="d1"), decode(address="d2")]
    prefix = tuple(range(20, 52))  # two blocks

    async def main() -> None:
        async with build_bench([p], decodes) as bench:
            settings = HandoffSettings(disaggregation_threshold_tokens=8)
            await collect(bench.build_flow((*prefix, 1), settings=settings))
            assert len(p.messages) == 1
            (first,) = [instance for instance in decodes if instance.messages]
            for token_id in range(2, 6):
                await collect(bench.build_flow((*prefix, token_id), settings=settings))
            assert len(p.messages) == 1
            assert len(first.messages) == 5
            await collect(bench.build_flow((*prefix, *range(9)), settings=settings))
            assert len(p.messages) == 2
            for instance in decodes:
                bench.fleet.prefix_memory.forget(instance.address)
            await collect(bench.build_flow((*prefix, 1), settings=settings))
            assert len(p.messages) == 3

    run(main())


@pytest.mark.parametrize("sampling", [{"max_tokens": 1}, {"stop_token_ids": (EXPECTED[0],)}])
def test_request_that_its_first_token_ends_never_reaches_decode(sampling: dict[str, Any]) -> None:
    p, d = prefill(), decode()
    tokens, batches, _ = run_flow([p], [d], **sampling)
    assert tokens == EXPECTED[:1]
    assert batches[-1].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert d.messages == []


@pytest.mark.parametrize("after", range(6))
def test_decode_lost_after_any_number_of_tokens_goes_on_with_the_same_tokens(after: int) -> None:
    d0, d1 = decode(Fault(after_tokens=after), address="d0"), decode(address="d1")
    tokens, batches, bench = run_flow([prefill()], [d0, d1])
    assert tokens == EXPECTED
    assert [batch.finish_reason for batch in batches if batch.finish_reason] == [FinishReason.LENGTH]
    if after < 5:
        assert d1.messages[0].output_token_ids == EXPECTED[: 1 + after]
        assert d1.messages[0].kv_transfer_params is None
        assert bench.get_metric("retries_total", reason="instance_lost") == 1


@pytest.mark.parametrize("after", range(7))
def test_colocated_decode_lost_after_any_number_of_tokens(after: int) -> None:
    d0, d1 = decode(Fault(after_tokens=after), address="d0"), decode(address="d1")
    assert run_flow([], [d0, d1])[0] == EXPECTED


def test_only_decode_instance_restarts_in_mid_stream() -> None:
    d = decode(Fault(after_tokens=2, stays=True))
    assert run_flow([prefill()], [d])[0] == EXPECTED
    assert [len(message.output_token_ids) for message in d.messages] == [1, 3]


def test_prefill_lost_before_its_token_is_replaced_by_another() -> None:
    p0, p1 = prefill(Fault(after_tokens=0), address="p0"), prefill(address="p1")
    d = decode()
    assert run_flow([p0, p1], [d])[0] == EXPECTED
    assert p1.messages[0].handoff
    assert d.messages[0].kv_transfer_params is not None


def test_prefill_lost_between_first_token_and_handoff_lets_decode_compute_the_prompt() -> None:
    p, d = prefill(Fault(before_handoff=True)), decode()
    tokens, batches, _ = run_flow([p], [d], logprobs=1)
    assert tokens == EXPECTED
    assert d.messages[0].output_token_ids == EXPECTED[:1]
    assert d.messages[0].kv_transfer_params is None
    assert [entry.token_id for batch in batches for entry in batch.logprobs] == EXPECTED


def test_prefill_pool_gone_lets_decode_do_all_of_it() -> None:
    p, d = prefill(Fault(not_connected=True)), decode()
    tokens, _, bench = run_flow([p], [d])
    assert tokens == EXPECTED
    assert d.messages[0].output_token_ids == []
    assert bench.get_metric("colocated_fallbacks_total") == 1


def test_losses_at_every_stage_of_one_request() -> None:
    p0, p1 = prefill(Fault(after_tokens=0), address="p0"), prefill(Fault(before_handoff=True), address="p1")
    d0, d1 = decode(address="d0"), decode(address="d1")
    assert run_flow([p0, p1], [d0, d1])[0] == EXPECTED


def test_tries_are_bounded() -> None:
    instances = [decode(Fault(after_tokens=0), address=f"d{i}") for i in range(5)]
    with pytest.raises(EngineError, match="3 instances failed the request"):
        run_flow([], instances)
    assert sum(len(instance.messages) for instance in instances) == 3


def test_retryable_engine_error_goes_elsewhere_and_keeps_the_tokens() -> None:
    d0, d1 = decode(Fault(error=ENGINE_ERROR, error_after_tokens=2), address="d0"), decode(address="d1")
    tokens, _, bench = run_flow([], [d0, d1])
    assert tokens == EXPECTED
    assert len(d1.messages) == 1
    assert bench.get_metric("retries_total", reason="engine_error") == 1


def test_instances_that_failed_are_tried_last() -> None:
    d0, d1 = decode(Fault(error=ENGINE_ERROR), address="d0"), decode(Fault(error=ENGINE_ERROR), address="d1")
    assert run_flow([], [d0, d1])[0] == EXPECTED
    assert len(d0.messages) + len(d1.messages) == 3


def test_clients_mistake_is_passed_on_and_never_retried() -> None:
    d0, d1 = decode(Fault(error=BAD_REQUEST), address="d0"), decode(address="d1")
    with pytest.raises(RequestError, match="no such thing") as caught:
        run_flow([], [d0, d1])
    assert (caught.value.http_status, caught.value.param) == (400, "top_p")
    assert d1.messages == []


def test_full_instance_is_passed_over() -> None:
    d0, d1 = decode(Fault(error=OVERLOADED), address="d0"), decode(address="d1")
    assert run_flow([], [d0, d1])[0] == EXPECTED


@pytest.mark.parametrize("error", [OVERLOADED, DRAINING])
def test_full_pool_is_overloaded(error: Any) -> None:
    instances = [decode(*[Fault(error=error)] * 9, address=f"d{i}") for i in range(4)]
    with pytest.raises(OverloadedError):
        run_flow([], instances)
    assert [len(instance.messages) for instance in instances] == [1, 1, 1, 1]


def test_full_decode_pool_after_the_first_token_is_waited_out_with_the_kv_kept() -> None:
    d = decode(Fault(error=OVERLOADED), Fault(error=OVERLOADED))

    async def main() -> None:
        async with build_bench([prefill()], [d]) as bench:
            settings = HandoffSettings(failover_wait_s=5)
            assert (await collect(bench.build_flow(PROMPT, settings=settings)))[0] == EXPECTED

    run(main())
    assert len(d.messages) == 3
    assert all(message.kv_transfer_params is not None for message in d.messages)


def test_decode_pool_that_stays_full_ends_the_request_in_bounded_time() -> None:
    d = decode(*[Fault(error=OVERLOADED)] * 100)
    with pytest.raises(OverloadedError):
        run_flow([prefill()], [d])


def test_no_decode_instance_is_unavailable_before_prefill_is_asked() -> None:
    p, d = prefill(), decode()
    d.ready = None
    with pytest.raises(UnavailableError):
        run_flow([p], [d])
    assert p.messages == []


def test_last_decode_instance_lost_for_good_ends_in_a_plain_error() -> None:
    with pytest.raises(UnavailableError, match="no decode instance takes work: d0 is"):
        run_flow([prefill()], [decode(Fault(after_tokens=1))])


def test_an_answer_never_goes_on_at_another_model_that_has_become_the_pool() -> None:
    other = decode()
    other.ready = build_ready(Role.DECODE, weights="w1")
    with pytest.raises(UnavailableError, match="others serve another model now"):
        run_flow([], [decode(Fault(after_tokens=2)), other])
    assert other.messages == []


def test_token_limit_reached_by_a_lost_leg_ends_with_length() -> None:
    class LastWordLost(FakeInstance):
        def _outputs(self, message: Any, fault: Fault) -> list[Any]:
            outputs = super()._outputs(message, Fault())
            last = outputs[-1]
            outputs[-1] = type(last)(request_id=last.request_id, new_token_ids=last.new_token_ids)
            return outputs

    d = LastWordLost(Role.DECODE, "d0", [Fault(after_tokens=6)])
    tokens, batches, _ = run_flow([], [d])
    assert tokens == EXPECTED
    assert batches[-1].finish_reason is FinishReason.LENGTH
    assert len(d.messages) == 1


def test_deadline_ends_a_silent_leg_and_aborts_it() -> None:
    d = decode(Fault(silent=True))

    async def main() -> None:
        async with build_bench([], [d]) as bench:
            with pytest.raises(RequestTimeoutError):
                await collect(bench.build_flow(PROMPT, timeout_s=0.02))

    run(main())
    assert d.aborted == ["r-0"]
    assert d.messages[0].timeout_s is not None
    assert 0 < d.messages[0].timeout_s <= 0.02


@pytest.mark.parametrize(
    ("num_batches", "aborted_by_prefill", "aborted_by_decode"), [(1, ["r-0"], []), (2, [], ["r-1"]), (4, [], ["r-1"])]
)
def test_closing_the_flow_aborts_the_leg_that_runs(
    num_batches: int, aborted_by_prefill: list[str], aborted_by_decode: list[str]
) -> None:
    p, d = prefill(), decode()

    async def main() -> None:
        async with build_bench([p], [d]) as bench:
            flow = bench.build_flow(PROMPT).run()
            for _ in range(num_batches):
                await anext(flow)
            await flow.aclose()

    run(main())
    assert (p.aborted, d.aborted) == (aborted_by_prefill, aborted_by_decode)


def test_cancelling_a_waiting_flow_aborts_its_prefill_leg() -> None:
    p = prefill(Fault(silent=True))

    async def main() -> None:
        async with build_bench([p], [decode()]) as bench:
            task = asyncio.create_task(collect(bench.build_flow(PROMPT)))
            while not p.messages:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    run(main())
    assert p.aborted == ["r-0"]


def test_prompt_logprobs_are_asked_of_the_first_leg_only() -> None:
    p, d = prefill(), decode()
    run_flow([p], [d], prompt_logprobs=2)
    assert p.messages[0].sampling.prompt_logprobs == 2
    assert d.messages[0].sampling.prompt_logprobs is None


def test_decode_that_computes_the_prompt_again_is_counted() -> None:
    _, _, bench = run_flow([prefill()], [decode(finds_kv=False)])
    assert bench.get_metric("decode_recomputed_prompts_total") == 1


def test_unexpected_outputs_after_the_end_are_dropped() -> None:
    class Talkative(FakeInstance):
        def _outputs(self, message: Any, fault: Fault) -> list[Any]:
            outputs = super()._outputs(message, fault)
            return [*outputs, outputs[0]]

    d = Talkative(Role.DECODE, "d0")
    assert run_flow([], [d])[0] == EXPECTED


def test_kv_that_nobody_will_fetch_is_given_up_once_at_its_producer() -> None:
    p = prefill()
    tokens, _, _ = run_flow([p], [decode(Fault(after_tokens=0)), decode(address="d1")])
    assert tokens == EXPECTED
    assert p.released == [p.messages[0].request_id]


def test_kv_that_was_fetched_is_left_to_its_consumer() -> None:
    p = prefill()
    run_flow([p], [decode(Fault(after_tokens=2)), decode(address="d1")])
    assert p.released == []


def test_client_that_leaves_between_the_legs_gives_the_kv_up() -> None:
    async def main() -> None:
        p, d = prefill(), decode(Fault(silent=True))
        async with build_bench([p], [d]) as bench:
            stream = bench.build_flow(PROMPT).run()
            assert (await anext(stream)).token_ids == EXPECTED[:1]
            waiting = asyncio.ensure_future(anext(stream))
            while not d.messages:
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert p.released == [p.messages[0].request_id]
            assert d.aborted == [d.messages[0].request_id]

    run(main())
