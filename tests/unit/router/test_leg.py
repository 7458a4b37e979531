"""Outputs that wait at a leg: taken as one, in order, nothing lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from fake_instances import ENGINE_ERROR, run

from pdserve.errors import PdserveError, RequestTimeoutError
from pdserve.protocol import FinishReason, KVTransferParams, RequestOutput, TimelineEvent, TokenLogprobs
from pdserve.router.leg import InstanceLostError, Leg

PARAMS = KVTransferParams(connector="c", transfer_id="t")


def build_output(*token_ids: int, **fields: object) -> RequestOutput:
    return RequestOutput(request_id="r", new_token_ids=list(token_ids), **fields)  # type: ignore[arg-type]


def with_leg(test: Callable[[Leg, list[str]], Awaitable[None]]) -> None:
    async def main() -> None:
        aborted: list[str] = []
        await test(Leg("r", aborted.append), aborted)

    run(main())


def test_waiting_outputs_are_taken_as_one() -> None:
    entries = [TokenLogprobs(token_id, -1.0, 1, [token_id], [-1.0]) for token_id in (1, 2, 3)]
    events = [TimelineEvent("first_token", 1), TimelineEvent("finished", 2)]

    async def test(leg: Leg, aborted: list[str]) -> None:
        leg.put(build_output(1, logprobs=entries[:1], num_cached_tokens=5, num_external_tokens=4, events=events[:1]))
        leg.put(build_output(2, logprobs=entries[1:2]))
        leg.put(
            build_output(3, logprobs=entries[2:], finish_reason=FinishReason.STOP, stop_token_id=3, events=events[1:])
        )
        assert await leg.next_output() == build_output(
            1, 2, 3, logprobs=entries, num_cached_tokens=5, num_external_tokens=4,
            finish_reason=FinishReason.STOP, stop_token_id=3, events=events,
        )  # fmt: skip
        leg.close()
        assert not aborted

    with_leg(test)


def test_single_output_is_passed_on_as_it_is() -> None:
    async def test(leg: Leg, aborted: list[str]) -> None:
        taking = asyncio.create_task(leg.next_output())
        await asyncio.sleep(0)
        output = build_output(1)
        leg.put(output)
        assert await taking is output

    with_leg(test)


@pytest.mark.parametrize(
    "last",
    [
        build_output(finish_reason=FinishReason.HANDOFF, kv_transfer_params=PARAMS),
        build_output(finish_reason=FinishReason.ERROR, error=ENGINE_ERROR),
        build_output(finish_reason=FinishReason.ABORT),
    ],
)
def test_end_that_is_no_part_of_the_answer_stands_alone(last: RequestOutput) -> None:
    async def test(leg: Leg, aborted: list[str]) -> None:
        for output in (build_output(1), build_output(2), last, build_output(3)):
            leg.put(output)
        assert await leg.next_output() == build_output(1, 2)
        assert await leg.next_output() == last

    with_leg(test)


def test_prompt_logprobs_and_absent_logprobs_survive() -> None:
    entry = TokenLogprobs(1, -1.0, 1, [], [])

    async def test(leg: Leg, aborted: list[str]) -> None:
        leg.put(build_output(1, prompt_logprobs=[entry]))
        leg.put(build_output(2))
        assert await leg.next_output() == build_output(1, 2, prompt_logprobs=[entry])

    with_leg(test)


@pytest.mark.parametrize(
    ("end", "error"),
    [(lambda leg: leg.lose("gone"), InstanceLostError), (lambda leg: leg.expire(), RequestTimeoutError)],
)
@pytest.mark.parametrize("waits", [True, False])
def test_outputs_before_a_loss_are_still_taken(
    end: Callable[[Leg], None], error: type[PdserveError], waits: bool
) -> None:
    async def test(leg: Leg, aborted: list[str]) -> None:
        leg.put(build_output(1))
        leg.put(build_output(2))
        if waits:
            assert await leg.next_output() == build_output(1, 2)
            asyncio.get_running_loop().call_soon(end, leg)
        else:
            end(leg)
            assert await leg.next_output() == build_output(1, 2)
        with pytest.raises(error):
            await leg.next_output()
        leg.close()
        assert aborted == (["r"] if error is RequestTimeoutError else [])

    with_leg(test)


def test_closing_aborts_once() -> None:
    async def test(leg: Leg, aborted: list[str]) -> None:
        leg.close()
        leg.close()
        leg.put(build_output(1))
        assert aborted == ["r"]

    with_leg(test)
