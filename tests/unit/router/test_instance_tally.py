"""What an instance's tally counts."""

from __future__ import annotations

import time

from pdserve.protocol import AddRequest, FinishReason, RequestOutput, SamplingParams, TimelineEvent
from pdserve.router.instance_tally import InstanceTally


def add(request_id: str, num_prompt: int, num_output: int = 0) -> AddRequest:
    return AddRequest(
        request_id=request_id,
        prompt_token_ids=list(range(num_prompt)),
        output_token_ids=list(range(num_output)),
        sampling=SamplingParams(),
    )


def test_full_hits_are_a_rate_of_one_and_count_once() -> None:
    tally = InstanceTally()
    tally.note_sent(add("prefix", 32))
    tally.note_sent(add("handed-over", 32, 1))
    tally.note_output(RequestOutput(request_id="prefix", new_token_ids=[1], num_cached_tokens=31))
    tally.note_output(
        RequestOutput(request_id="handed-over", new_token_ids=[1, 2], num_cached_tokens=32, num_external_tokens=32)
    )
    tally.note_output(RequestOutput(request_id="handed-over", new_token_ids=[3], finish_reason=FinishReason.LENGTH))
    assert tally.num_legs == 2
    assert tally.num_tokens == 4
    assert tally.num_hittable_tokens == tally.num_cached_tokens == 63
    assert tally.num_external_tokens == 32


def test_legs_without_a_token_are_forgotten() -> None:
    tally = InstanceTally()
    for name in ("aborted", "failed"):
        tally.note_sent(add(name, 10))
    tally.note_aborted("aborted")
    tally.note_output(RequestOutput(request_id="failed", finish_reason=FinishReason.ERROR))
    assert (tally.num_hittable_tokens, tally._num_given) == (0, {})


def test_clock_ahead_shows_as_a_negative_age() -> None:
    tally = InstanceTally()
    now_ns = time.time_ns()
    for offset_ns in (-5_000_000, 3_600_000_000_000, 0):
        event = TimelineEvent("queued", now_ns + offset_ns)
        tally.note_output(RequestOutput(request_id="x", events=[event]))
    assert tally.least_event_age_ms is not None
    assert -3_600_001 < tally.least_event_age_ms < -3_500_000
