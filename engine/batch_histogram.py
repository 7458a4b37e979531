"""A Prometheus histogram that takes many values at once: one step's, for every running request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
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
        self._bounds = np.array(buckets)
        self._counts = np.zeros(len(buckets) + 1, dtype=np.int64)
        self._sum = 0.0
        registry.register(self)

    def observe(self, values: Sequence[float]) -> None:
        """Count these values."""
        if values:
            # A value equal to a bound belongs below it.
            self._counts += np.bincount(np.searchsorted(self._bounds, values), minlength=len(self._counts))
            self._sum += sum(values)

    def describe(self) -> Iterator[HistogramMetricFamily]:
        """Called by the registry, for the names of the samples."""
        yield HistogramMetricFamily(self._name, self._text)

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Called by the registry."""
        bounds = [*(str(bound) for bound in self._bounds.tolist()), "+Inf"]
        cumulative = self._counts.cumsum().tolist()
        yield HistogramMetricFamily(
            self._name, self._text, buckets=list(zip(bounds, cumulative, strict=True)), sum_value=self._sum
        )
