"""A Prometheus histogram that takes many values at once: one step's, for every running request."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class BatchHistogram(Collector):
    """Written by one thread, rendered by another: a reader may see a step's values in part, never twice.

    Args:
        name: of the metric.
        text: its description.
        buckets: upper bounds, rising, without infinity.
        registry: where it is rendered.
    """

    def __init__(self, name: str, text: str, buckets: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._text = text
        self._bounds = tuple(float(bound) for bound in buckets)
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, values: Sequence[float]) -> None:
        """Count these values."""
        for value in values:
            self._counts[bisect_left(self._bounds, value)] += 1  # a value equal to a bound belongs below it
        self._sum += sum(values)

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """Called by the registry, for the names of the samples."""
        yield HistogramMetricFamily(self._name, self._text)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Called by the registry."""
        bounds = [*(str(bound) for bound in self._bounds), "+Inf"]
        cumulative = itertools.accumulate(self._counts)
        yield HistogramMetricFamily(
            self._name, self._text, buckets=list(zip(bounds, cumulative, strict=True)), sum_value=self._sum
        )
