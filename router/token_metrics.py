"""The two metrics that change with every token, counted without locks.

The client library's own counters take a lock for each value, which everything else can afford. These are plain numbers
that the event loop changes and reads.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class TokenMetrics(Collector):
    """Tokens that went to clients, and the time between them. Lives on the event loop.

    Args:
        prefix: in front of both names.
        bounds_s: upper bounds of the buckets, ascending.
    """

    def __init__(self, prefix: str, bounds_s: Sequence[float]) -> None:
        self._prefix = prefix
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(self._bounds_s) + 1)
        self._sum_s = 0.0
        self._num_tokens = 0

    def note_tokens(self, num_tokens: int) -> None:
        """Tokens go to a client."""
        self._num_tokens += num_tokens

    def note_gap(self, gap_s: float) -> None:
        """Tokens came so long after the last ones of the same choice."""
        self._counts[bisect_left(self._bounds_s, gap_s)] += 1
        self._sum_s += gap_s

    def describe(self) -> Iterator[Metric]:
        """Their names, for the registry."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """Both, for the registry."""
        yield CounterMetricFamily(
            f"{self._prefix}generation_tokens", "Tokens that went to clients", value=self._num_tokens
        )
        bounds = [*map(floatToGoString, self._bounds_s), "+Inf"]
        yield HistogramMetricFamily(
            f"{self._prefix}inter_token_latency_seconds",
            "Between two arrivals of one choice's tokens",
            buckets=list(zip(bounds, itertools.accumulate(self._counts), strict=True)),
            sum_value=self._sum_s,
        )
