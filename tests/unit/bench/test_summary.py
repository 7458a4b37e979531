from __future__ import annotations

import pytest

from pdserve.bench.measure.samples import Failure, RequestSample
from pdserve.bench.measure.summary import Distribution, Objective, percentile, summarise


def sample(
    index: int, events: list[float], *, sent: float = 0.0, tokens: int | None = None, failure: str | None = None
):
    return RequestSample(
        index=index,
        due_s=sent,
        sent_s=sent,
        clock_s=sent,
        event_times_s=events,
        end_s=events[-1] if events else sent + 0.5,
        num_prompt_tokens=10,
        num_output_tokens=len(events) if tokens is None else tokens,
        has_usage=True,
        failure=None if failure is None else Failure(failure, f"{failure} of {index}"),
    )


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1.0), (0.25, 1.75), (0.5, 2.5), (0.9, 3.7), (0.99, 3.97), (1.0, 4.0)]
)
def test_percentiles_lie_between_neighbours(share: float, expected: float) -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], share) == pytest.approx(expected, abs=1e-12)


def test_a_percentile_of_one_value_is_that_value() -> None:
    assert [percentile([7.0], share) for share in (0.0, 0.5, 0.99, 1.0)] == [7.0] * 4


def test_distribution_does_not_mind_the_order() -> None:
    values = Distribution.of([3.0, 1.0, 2.0])
    assert values == Distribution(
        count=3, mean=2.0, p50=2.0, p90=pytest.approx(2.8), p99=pytest.approx(2.98), maximum=3.0
    )
    assert Distribution.of([]) is None


def test_times_of_one_request() -> None:
    one = sample(0, [1.5, 1.75, 2.5], sent=1.0, tokens=5)
    assert one.ttft_s == 0.5
    assert one.itls_s == [0.25, 0.75]
    assert one.tpot_s == 0.25  # 1 s for the four tokens after the first
    assert one.e2e_s == 1.5
    assert sample(0, [1.0]).tpot_s is None


def test_a_run_adds_up() -> None:
    summary = summarise([sample(0, [0.5, 1.0]), sample(1, [1.5, 2.0, 2.5], sent=1.0)])
    assert (summary.num_requests, summary.num_ok, summary.num_lost) == (2, 2, 0)
    assert summary.duration_s == 2.5
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (20, 5)
    assert summary.requests_per_s == 0.8
    assert summary.output_tokens_per_s == 2.0
    assert summary.total_tokens_per_s == 10.0
    assert summary.ttft_s is not None
    assert summary.ttft_s.p50 == 0.5
    assert summary.itl_s is not None
    assert (summary.itl_s.count, summary.itl_s.p50) == (3, 0.5)
    assert summary.goodput is None


def test_lost_requests_are_named_and_take_no_part() -> None:
    samples = [
        sample(0, [0.5, 1.0]),
        sample(1, [9.0, 99.0], failure="cut_short"),
        sample(2, [], failure="http_503"),
        sample(3, [], failure="http_503"),
    ]
    summary = summarise(samples, Objective(e2e_s=10.0))
    assert (summary.num_ok, summary.num_lost) == (1, 3)
    assert [(lost.kind, lost.count) for lost in summary.lost] == [("http_503", 2), ("cut_short", 1)]
    assert summary.lost[0].example == "http_503 of 2"
    assert summary.num_output_tokens == 2
    assert summary.ttft_s is not None
    assert summary.ttft_s.count == 1
    assert summary.ttft_s.maximum == 0.5
    assert summary.attainment == 0.25  # of all that were sent, not of those that came back


def test_nothing_but_losses_gives_no_latency_at_all() -> None:
    summary = summarise([sample(0, [], failure="connect")])
    assert summary.ttft_s is summary.itl_s is summary.tpot_s is summary.e2e_s is None
    assert summary.output_tokens_per_s == 0.0


@pytest.mark.parametrize(
    ("objective", "num_good"),
    [
        (Objective(ttft_s=0.2), 2),
        (Objective(ttft_s=0.1), 1),
        (Objective(itl_s=0.5), 2),
        (Objective(itl_s=0.2), 1),
        (Objective(ttft_s=0.1, itl_s=0.2), 0),
        (Objective(tpot_s=0.1), 2),
        (Objective(e2e_s=0.35), 1),
        (Objective(ttft_s=1.0, e2e_s=1.0), 2),
    ],
)
def test_goodput_counts_requests_within_every_bound(objective: Objective, num_good: int) -> None:
    steady = sample(0, [0.2, 0.25, 0.3])
    stalled = sample(1, [0.1, 0.15, 0.65], tokens=10)
    summary = summarise([steady, stalled], objective)
    assert summary.attainment == num_good / 2
    assert summary.goodput == pytest.approx(num_good / 0.65)


def test_one_gap_in_a_hundred_may_be_longer_than_the_objective() -> None:
    times = [0.01 * i for i in range(200)]
    assert Objective(itl_s=0.02).is_met(sample(0, [*times, times[-1] + 1.0]))
    assert not Objective(itl_s=0.02).is_met(sample(0, [*times, *(times[-1] + gap for gap in (1.0, 2.0, 3.0, 4.0))]))


def test_an_objective_without_bounds_is_none() -> None:
    assert not Objective().is_set
    assert summarise([sample(0, [1.0])], Objective()).attainment is None


def test_waiting_for_a_slot_counts_under_timed_arrivals() -> None:
    waited = RequestSample(0, due_s=1.0, sent_s=3.0, clock_s=1.0, event_times_s=[3.5], end_s=3.5, num_output_tokens=1)
    assert waited.ttft_s == 2.5
    summary = summarise([waited])
    assert summary.send_delay_s is not None
    assert summary.send_delay_s.maximum == 2.0
