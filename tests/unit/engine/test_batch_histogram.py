"""A step's values in one go count as one by one."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from pdserve.engine.batch_histogram import BatchHistogram

BUCKETS = (0.01, 0.1, 1.0)


def test_it_renders_what_a_histogram_renders() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    batches = BatchHistogram("gap_seconds", "Gaps", BUCKETS, ours)
    single = Histogram("gap_seconds", "Gaps", buckets=BUCKETS, registry=theirs)
    rng = random.Random(1)
    for _ in range(50):
        values = [rng.choice((0.0, 0.01, 0.05, 0.1, 1.0, 4.0)) for _ in range(rng.randrange(5))]
        batches.observe(values)
        for value in values:
            single.observe(value)

    def lines(registry: CollectorRegistry) -> list[str]:
        return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]

    without_sum = [[line for line in lines(r) if "_sum" not in line] for r in (ours, theirs)]
    assert without_sum[0] == without_sum[1]
    sums = [[float(line.split()[1]) for line in lines(r) if "_sum" in line] for r in (ours, theirs)]
    assert abs(sums[0][0] - sums[1][0]) < 1e-9
