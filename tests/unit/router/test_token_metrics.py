"""The metrics of single tokens, beside the client library's own as the oracle."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from pdserve.router.token_metrics import TokenMetrics

BOUNDS_S = (0.001, 0.0025, 0.5, 1.0)


def read_samples(registry: CollectorRegistry) -> list[str]:
    lines = generate_latest(registry).decode().splitlines()
    return sorted(line for line in lines if not line.startswith("#") and "_created" not in line)


def test_shows_what_the_client_librarys_own_metrics_show() -> None:
    registry, expected = CollectorRegistry(), CollectorRegistry()
    tokens = TokenMetrics("p_", BOUNDS_S)
    registry.register(tokens)
    counter = Counter("p_generation_tokens_total", "-", registry=expected)
    histogram = Histogram("p_inter_token_latency_seconds", "-", buckets=BOUNDS_S, registry=expected)
    numbers = random.Random(1)
    for gap_s in (*BOUNDS_S, 0.0, 7.0, *(numbers.uniform(0, 2) for _ in range(100))):
        tokens.note_gap(gap_s)
        histogram.observe(gap_s)
        tokens.note_tokens(3)
        counter.inc(3)
    assert read_samples(registry) == read_samples(expected)
