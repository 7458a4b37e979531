"""Measures what this machine does: memory read, memory copied, matrix products. The best of many tries counts."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from pdserve.bench.measure.model_floors import MachineRates

_BUFFER_BYTES = 256 * 1024 * 1024
"""Beyond the caches of the machines there are."""
_MATRIX_SIZES = (1024, 2048)
_MIN_TRIES = 3


def measure_rates(num_threads: int, seconds: float, dtype: torch.dtype) -> MachineRates:
    """Measure with ``num_threads`` of torch's threads; its number of threads is as before afterwards.

    Args:
        num_threads: compute threads.
        seconds: how long to try for each of the figures; at least three tries are made.
        dtype: of the matrix products.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        source = torch.ones(_BUFFER_BYTES // 8, dtype=torch.int64)
        target = torch.empty_like(source)
        # Which way of reading comes nearest to what the memory gives differs between machines.
        halves = source.view(torch.float32).chunk(2)
        readings = (source.amax, lambda: torch.dot(*halves))
        read_s = min(_best_time_s(reading, seconds / len(readings)) for reading in readings)
        copy_s = _best_time_s(lambda: target.copy_(source), seconds)
        flops = max(_measure_flops(size, dtype, seconds / len(_MATRIX_SIZES)) for size in _MATRIX_SIZES)
    finally:
        torch.set_num_threads(before)
    return MachineRates(
        num_threads=num_threads,
        read_bytes_per_s=_BUFFER_BYTES / read_s,
        copy_bytes_per_s=_BUFFER_BYTES / copy_s,
        flops=flops,
    )


def _measure_flops(size: int, dtype: torch.dtype, seconds: float) -> float:
    left, right = (torch.randn(size, size).to(dtype) for _ in range(2))
    out = torch.empty(size, size, dtype=dtype)
    return float(2 * size**3 / _best_time_s(lambda: torch.mm(left, right, out=out), seconds))


def _best_time_s(work: Callable[[], object], seconds: float) -> float:
    deadline_s = time.perf_counter() + seconds
    best_s = float("inf")
    num_tries = 0
    while num_tries < _MIN_TRIES or time.perf_counter() < deadline_s:
        started_s = time.perf_counter()
        work()
        best_s = min(best_s, time.perf_counter() - started_s)
        num_tries += 1
    return best_s
