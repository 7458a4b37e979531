"""Finds the highest rate at which enough requests are good."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.bench.measure.summary import Summary

_MAX_DOUBLINGS = 12


@dataclass(frozen=True, slots=True)
class RatePoint:
    """One rate, and what it gave."""

    rate: float
    summary: Summary

    def is_good_enough(self, attainment: float) -> bool:
        """Whether at least this share of all requests met the objective."""
        return self.summary.attainment is not None and self.summary.attainment >= attainment


def measure_rates(measure: Callable[[float], Summary], rates: Sequence[float]) -> list[RatePoint]:
    """Measure the given rates, ascending."""
    return [RatePoint(rate, measure(rate)) for rate in sorted(rates)]


def search_rates(
    measure: Callable[[float], Summary], *, start_rate: float, attainment: float, num_refinements: int
) -> list[RatePoint]:
    """Double the rate until too few requests are good, then halve the gap on a logarithmic scale.

    Where the first rate is too high already, it is halved instead until one is low enough.

    Args:
        measure: sends requests at a rate.
        start_rate: the first rate.
        attainment: the share of requests that must be good.
        num_refinements: how often the gap is halved.

    Returns:
        Every point that was measured, ascending.
    """
    points = [RatePoint(start_rate, measure(start_rate))]
    factor = 2.0 if points[0].is_good_enough(attainment) else 0.5
    for _ in range(_MAX_DOUBLINGS):
        points.append(RatePoint(points[-1].rate * factor, measure(points[-1].rate * factor)))
        if points[-1].is_good_enough(attainment) != points[-2].is_good_enough(attainment):
            break
    low, high = sorted((points[-1].rate, points[-2].rate))
    if points[-1].is_good_enough(attainment) != points[-2].is_good_enough(attainment):
        for _ in range(num_refinements):
            middle = RatePoint(math.sqrt(low * high), measure(math.sqrt(low * high)))
            points.append(middle)
            low, high = (middle.rate, high) if middle.is_good_enough(attainment) else (low, middle.rate)
    return sorted(points, key=lambda point: point.rate)


def find_best(points: Sequence[RatePoint], attainment: float) -> RatePoint | None:
    """The point with the highest rate of those where enough requests were good; None where it was none."""
    good = [point for point in points if point.is_good_enough(attainment)]
    return max(good, key=lambda point: point.rate, default=None)
