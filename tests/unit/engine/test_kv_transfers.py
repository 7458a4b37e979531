"""What a connector may say wrongly, and loads that are done in the step that asks for them."""

from __future__ import annotations

import pytest
from scripted import BLOCK_SIZE, SchedulerHarness

from pdserve.connectors.base import ConnectorOutput, MatchResult
from pdserve.protocol import FinishReason

PROMPT = range(10, 19)  # two blocks and a token


def test_no_more_is_loaded_than_the_prompt_has_whatever_is_promised() -> None:
    h = SchedulerHarness()
    h.connector.matches["d"] = [MatchResult(999, is_async=True)]
    h.add("d", PROMPT, output=[77, 78, 79, 80, 81])
    h.step()
    assert h.connector.allocated == [("d", (0, 1, 2), len(PROMPT))]


def test_a_promise_below_zero_is_none() -> None:
    h = SchedulerHarness()
    h.connector.matches["d"] = [MatchResult(-5, is_async=True)]
    h.add("d", PROMPT)
    h.step()
    assert h.scheduled == {"d": len(PROMPT)}


def test_who_is_told_to_ask_again_for_ever_holds_nobody_up_and_ends_at_its_deadline() -> None:
    h = SchedulerHarness()
    h.connector.matches["d"] = [MatchResult(None)]
    h.add("d", PROMPT, timeout_s=5.0)
    h.add("e", range(30, 35))
    h.step()
    assert h.scheduled == {"e": 5}
    h.now_s = 6.0
    assert [output.finish_reason for output in h.scheduler.expire_requests()] == [FinishReason.TIMEOUT]
    assert h.scheduler.num_waiting == 0


def test_a_step_names_the_asynchronous_loads_that_begin_with_it() -> None:
    h = SchedulerHarness()
    h.connector.matches |= {"d": [MatchResult(8, is_async=True)], "s": [MatchResult(8)]}
    for request_id in ("d", "s", "none"):
        h.add(request_id, PROMPT, salt=request_id)
    h.step()
    assert h.last_step is not None
    assert h.last_step.loads_started == ("d",)
    h.scheduler.abort_requests(["d"])
    h.step()
    assert h.last_step.loads_started == ()


@pytest.mark.parametrize(("invalid", "num_good"), [({0, 1, 2}, 0), ({1}, BLOCK_SIZE), ({2, 99, -1}, 2 * BLOCK_SIZE)])
def test_a_synchronous_load_that_did_not_come_whole_is_computed_and_not_counted(
    invalid: set[int], num_good: int
) -> None:
    h = SchedulerHarness()
    h.connector.matches["d"] = [MatchResult(len(PROMPT))]
    request = h.add("d", PROMPT, output=[77])
    assert h.step(ConnectorOutput(invalid_block_ids=invalid)) == []
    h.step()
    assert h.last_step is not None
    assert h.scheduled == {"d": len(PROMPT) + 1 - num_good}
    assert [new.token_ids for new in h.last_step.new_requests] == [(*PROMPT, 77)]  # without what was sampled meanwhile
    assert (request.num_cached_tokens, request.num_external_tokens) == (num_good, num_good)


def test_a_synchronous_load_that_did_not_come_whole_ends_the_request_where_the_policy_says_so() -> None:
    h = SchedulerHarness(kv_load_failure_policy="fail")
    h.connector.matches["d"] = [MatchResult(len(PROMPT))]
    h.add("d", PROMPT, output=[77])
    (output,) = h.step(ConnectorOutput(invalid_block_ids={1}))
    assert output.error is not None
    assert output.error.code == "kv_transfer_failed"
    assert h.num_used_blocks == 0


def test_blocks_that_nobody_has_are_nobodys_failure() -> None:
    h = SchedulerHarness()
    h.connector.matches["d"] = [MatchResult(len(PROMPT))]
    h.add("d", PROMPT, output=[77])
    (output,) = h.step(ConnectorOutput(invalid_block_ids={50, 9999, -1}))
    assert output.num_external_tokens == len(PROMPT)
