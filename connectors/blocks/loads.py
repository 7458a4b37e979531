"""Loading: from a store into blocks of KV memory, off the forward thread.

A load is cut into parts of a few blocks that any reader thread takes, a short one so that every thread gets some. Its
end is reported once, when all parts have stopped: until then a thread may still write to the blocks.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable

from pdserve.connectors.base import ConnectorOutput
from pdserve.connectors.blocks.block_memory import BlockMemory
from pdserve.connectors.blocks.failures import Failure, WarningLimiter
from pdserve.connectors.blocks.messages import LoadRequest
from pdserve.connectors.blocks.read_pace import ReadPace
from pdserve.connectors.blocks.store import BlockStore
from pdserve.connectors.blocks.task_threads import TaskThreads

_LATE = Failure("timeout", "the load took too long")
_LONG_S = 1.0


class _Load:
    """One load under way; its fields are guarded by the loader's lock."""

    def __init__(self, request: LoadRequest, num_parts: int, deadline: float) -> None:
        self.request = request
        self.num_running_parts = num_parts
        self.deadline = deadline
        self.first_bad = len(request.blocks)
        self.num_bytes = 0
        self.has_failed = False

    @property
    def num_good_tokens(self) -> int:
        """Tokens before the first bad block."""
        good = sum(block.num_tokens for block in self.request.blocks[: self.first_bad])
        return min(good, self.request.num_tokens)


class BlockLoader:
    """Runs loads on reader threads and keeps their results until they are polled.

    Args:
        store: where blocks come from.
        block_bytes: size of a block.
        threads: run the parts.
        warnings: log lines for people.
        pace: of the reader threads.
        timeout_s: longest time for one load; looked at between two blocks.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: BlockStore,
        block_bytes: int,
        threads: TaskThreads,
        warnings: WarningLimiter,
        *,
        pace: ReadPace,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._block_bytes = block_bytes
        self._threads = threads
        self._warnings = warnings
        self._pace = pace
        self._wake_engine: Callable[[], None] = lambda: None
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._active: dict[str, _Load] = {}
        self._report = ConnectorOutput()

    def set_wake_up(self, wake: Callable[[], None]) -> None:
        """Called when a load can be reported."""
        self._wake_engine = wake

    def start(self, request: LoadRequest, memory: BlockMemory) -> None:
        """Begin a load; one whose request has a load that is not reported yet is refused and counted."""
        size = max(min(self._store.blocks_per_read, -(-len(request.blocks) // self._threads.num_threads)), 1)
        starts = range(0, len(request.blocks), size)
        load = _Load(request, len(starts), self._clock() + self._timeout_s)
        with self._lock:
            if request.request_id in self._active:
                self._report.stats.count_failure("duplicate")
                return
            self._active[request.request_id] = load
            if not starts:
                self._finish(load)
        ends = (min(start + size, len(request.blocks)) for start in starts)
        parts = zip(starts, ends, strict=True)
        self._threads.submit(*(functools.partial(self._run_part, load, start, end, memory) for start, end in parts))

    @property
    def is_behind(self) -> bool:
        """Whether a load has been under way for long."""
        latest = self._clock() + self._timeout_s - _LONG_S
        with self._lock:
            return any(load.deadline < latest for load in self._active.values())

    def take_report(self) -> ConnectorOutput:
        """What ended since the last call."""
        with self._lock:
            report, self._report = self._report, ConnectorOutput()
            for request_id in (*report.finished_receiving, *report.failed_receiving):
                del self._active[request_id]
            return report

    def _run_part(self, load: _Load, start: int, end: int, memory: BlockMemory) -> None:
        done = start
        began = time.perf_counter()
        try:
            with contextlib.closing(self._store.read(load.request.blocks[start:end], memory)) as results:
                while done < min(end, load.first_bad):
                    if pause_s := self._pace.get_pause_s():
                        time.sleep(pause_s)
                    self._pace.begin_piece()
                    failure = next(results) if self._clock() < load.deadline else _LATE
                    if failure is not None:
                        self._tell(load, done, failure)
                        break
                    done += 1
        finally:
            self._stop_part(load, done, is_whole=done == end, num_done=done - start, began=began)

    def _tell(self, load: _Load, index: int, failure: Failure) -> None:
        """Count and log a load's failure: the first one, for the other parts fail with it."""
        with self._lock:
            if load.has_failed:
                return
            load.has_failed = True
            self._report.stats.count_failure(failure.kind)
        name = load.request.blocks[index].key.hex
        self._warnings.warn(failure.kind, f"KV block {name} could not be loaded: {failure.reason}; it is recomputed")

    def _stop_part(self, load: _Load, done: int, *, is_whole: bool, num_done: int, began: float) -> None:
        with self._lock:
            if not is_whole:
                load.first_bad = min(load.first_bad, done)
            load.num_bytes += num_done * self._block_bytes
            self._report.stats.num_blocks_loaded += num_done
            self._report.stats.num_bytes_loaded += num_done * self._block_bytes
            self._report.stats.load_seconds += time.perf_counter() - began
            load.num_running_parts -= 1
            is_over = load.num_running_parts == 0
            if is_over:
                self._finish(load)
        if is_over:
            self._wake_engine()

    def _finish(self, load: _Load) -> None:
        request_id = load.request.request_id
        self._report.received_bytes[request_id] = load.num_bytes
        if load.num_good_tokens == load.request.num_tokens:
            self._report.finished_receiving.add(request_id)
        else:
            self._report.failed_receiving[request_id] = load.num_good_tokens
