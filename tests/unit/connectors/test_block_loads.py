"""Loads in parts: what is told of one whose parts fail together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Generator, Sequence

import torch

from pdserve.connectors.blocks.block_memory import BlockMemory
from pdserve.connectors.blocks.failures import Failure, WarningLimiter
from pdserve.connectors.blocks.loads import BlockLoader
from pdserve.connectors.blocks.messages import BlockTransfer, LoadRequest
from pdserve.connectors.blocks.read_pace import ReadPace
from pdserve.connectors.blocks.task_threads import TaskThreads
from pdserve.connectors.testing.kv_content import TINY_SPEC

NUM_PARTS = 2


class BrokenStore:
    """Fails all parts of a load at the same moment."""

    blocks_per_read = 1

    def __init__(self) -> None:
        self._all_begun = threading.Barrier(NUM_PARTS)

    def read(self, blocks: Sequence[BlockTransfer], memory: BlockMemory) -> Generator[Failure | None]:
        self._all_begun.wait(60)
        yield Failure("unreachable", "gone")


def test_a_load_that_failed_is_counted_once() -> None:
    threads = TaskThreads("load", NUM_PARTS)
    warnings = WarningLimiter(logging.getLogger("kv-test"), time.monotonic)
    loader = BlockLoader(
        BrokenStore(), TINY_SPEC.block_bytes, threads, warnings, pace=ReadPace(), timeout_s=60.0, clock=time.monotonic
    )
    has_ended = threading.Event()
    loader.set_wake_up(has_ended.set)
    blocks = [BlockTransfer(bytes([i] * 16), TINY_SPEC.block_size, i) for i in range(NUM_PARTS)]
    kv_cache = torch.zeros((NUM_PARTS, *TINY_SPEC.block_shape), dtype=getattr(torch, TINY_SPEC.dtype))
    memory = BlockMemory(kv_cache, TINY_SPEC, "broken")
    loader.start(LoadRequest("r", NUM_PARTS * TINY_SPEC.block_size, blocks), memory)
    assert has_ended.wait(60)
    report = loader.take_report()
    assert report.failed_receiving == {"r": 0}
    assert report.stats.failures == {"unreachable": 1}
    assert threads.close(60)
