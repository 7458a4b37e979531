"""When each request of a workload is due."""

from __future__ import annotations

import itertools
import random


def build_due_times(num_requests: int, *, rate: float | None, arrivals: str, burst_size: int, seed: int) -> list[float]:
    """Seconds since the run's beginning at which each request is due, ascending; the first at 0.

    Args:
        num_requests: how many.
        rate: requests a second on average; None with ``arrivals="burst"``.
        arrivals: ``burst`` (all at once), ``constant`` (evenly spaced), ``poisson`` (exponential gaps: clients
            that know nothing of each other).
        burst_size: this many arrive together; the gaps grow so that the rate stays the average.
        seed: of the random gaps.
    """
    if arrivals == "burst" or rate is None:
        return [0.0] * num_requests
    num_groups = -(-num_requests // burst_size)
    group_rate = rate / burst_size
    if arrivals == "constant":
        group_times = [index / group_rate for index in range(num_groups)]
    else:
        generator = random.Random(seed)
        gaps = [generator.expovariate(group_rate) for _ in range(num_groups - 1)]
        group_times = list(itertools.accumulate(gaps, initial=0.0))
    return [group_times[index // burst_size] for index in range(num_requests)]
