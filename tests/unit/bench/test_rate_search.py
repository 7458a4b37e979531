from __future__ import annotations

import pytest

from pdserve.bench.measure.ratios import Ratio, compare_rounds
from pdserve.bench.measure.samples import Failure, RequestSample
from pdserve.bench.measure.summary import Objective, Summary, summarise
from pdserve.bench.rate_search import find_best, measure_rates, search_rates


class Service:
    """Good up to a rate; beyond it the more requests are late the higher the rate."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.asked: list[float] = []

    def __call__(self, rate: float) -> Summary:
        self.asked.append(rate)
        num_good = round(100 * min(1.0, self.capacity / rate))
        samples = [RequestSample(i, 0.0, 0.0, 0.0, [0.1], 0.1, 1, 1) for i in range(num_good)]
        samples += [
            RequestSample(i, 0.0, 0.0, 0.0, [9.0], 9.0, 1, 1, failure=Failure("http_429", "full"))
            for i in range(num_good, 100)
        ]
        return summarise(samples, Objective(ttft_s=1.0))


def test_the_rate_is_doubled_until_too_few_are_good_and_then_refined() -> None:
    service = Service(capacity=5.0)
    points = search_rates(service, start_rate=1.0, attainment=0.9, num_refinements=3)
    assert service.asked[:4] == [1.0, 2.0, 4.0, 8.0]
    assert [point.rate for point in points] == sorted(service.asked)
    assert len(points) == 7
    best = find_best(points, 0.9)
    assert best is not None
    assert 5.0 <= best.rate <= 5.0 / 0.89  # nine of ten good: a ninth above the capacity
    assert best.rate == max(point.rate for point in points if (point.summary.attainment or 0) >= 0.9)


def test_a_first_rate_that_is_too_high_is_halved() -> None:
    service = Service(capacity=1.0)
    points = search_rates(service, start_rate=8.0, attainment=0.95, num_refinements=0)
    assert service.asked == [8.0, 4.0, 2.0, 1.0]
    best = find_best(points, 0.95)
    assert best is not None
    assert best.rate == 1.0


@pytest.mark.parametrize("capacity", [0.0, 1e9])
def test_a_service_without_a_limit_in_reach_ends_the_search(capacity: float) -> None:
    service = Service(capacity)
    points = search_rates(service, start_rate=1.0, attainment=0.9, num_refinements=5)
    assert len(points) == len(service.asked) == 13
    assert (find_best(points, 0.9) is None) == (capacity == 0.0)


def test_given_rates_are_all_measured_in_order() -> None:
    points = measure_rates(Service(2.0), [4.0, 1.0, 2.0])
    assert [point.rate for point in points] == [1.0, 2.0, 4.0]
    assert [point.summary.attainment for point in points] == [1.0, 1.0, 0.5]


def test_ratios_are_taken_within_rounds() -> None:
    # The machine was half as fast in the second round, for both.
    assert compare_rounds([100.0, 50.0, 120.0], [50.0, 25.0, 40.0], is_more_better=True) == Ratio(2.0, 2.0, 3.0, 3)
    assert compare_rounds([10.0], [30.0], is_more_better=False) == Ratio(3.0, 3.0, 3.0, 1)


def test_rounds_without_both_figures_do_not_count() -> None:
    assert compare_rounds([1.0, None, 4.0], [1.0, 5.0, None], is_more_better=True) == Ratio(1.0, 1.0, 1.0, 1)
    assert compare_rounds([None], [1.0], is_more_better=True) is None
    assert compare_rounds([0.0], [1.0], is_more_better=False) is None
