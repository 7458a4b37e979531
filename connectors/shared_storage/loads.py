"""Loading: files into blocks of KV memory, off the forward thread.

A load is cut into parts of a few blocks that any reader thread takes. Its end is reported once, when all parts have
stopped: until then a thread may still write to the blocks.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Sequence

from pdserve.connectors.base import ConnectorOutput
from pdserve.connectors.shared_storage.block_file import BlockFormat, InvalidBlockError
from pdserve.connectors.shared_storage.block_memory import BlockMemory
from pdserve.connectors.shared_storage.directory import BlockDirectory
from pdserve.connectors.shared_storage.failures import WarningLimiter, classify_os_error
from pdserve.connectors.shared_storage.messages import BlockTransfer, LoadRequest
from pdserve.connectors.shared_storage.task_threads import TaskThreads

_BLOCKS_IN_PART = 8


class _Load:
    """One load under way; its fields are guarded by the loader's lock."""

    def __init__(self, request: LoadRequest, num_parts: int) -> None:
        self.request = request
        self.num_running_parts = num_parts
        self.first_bad = len(request.blocks)
        self.num_bytes = 0

    @property
    def num_good_tokens(self) -> int:
        """Tokens before the first bad block."""
        good = sum(block.num_tokens for block in self.request.blocks[: self.first_bad])
        return min(good, self.request.num_tokens)


class BlockLoader:
    """Runs loads on reader threads and keeps their results until they are polled.

    Args:
        directory: where files are.
        block_format: how they are read.
        threads: run the parts.
        warnings: log lines for people.
    """

    def __init__(
        self,
        directory: BlockDirectory,
        block_format: BlockFormat,
        threads: TaskThreads,
        warnings: WarningLimiter,
    ) -> None:
        self._directory = directory
        self._format = block_format
        self._threads = threads
        self._warnings = warnings
        self._lock = threading.Lock()
        self._active: dict[str, _Load] = {}
        self._report = ConnectorOutput()

    def start(self, request: LoadRequest, memory: BlockMemory) -> None:
        """Begin a load; one whose request has a load that is not reported yet is refused and counted."""
        starts = range(0, len(request.blocks), _BLOCKS_IN_PART)
        load = _Load(request, len(starts))
        with self._lock:
            if request.request_id in self._active:
                self._report.stats.count_failure("duplicate")
                return
            self._active[request.request_id] = load
            if not starts:
                self._finish(load)
        for start in starts:
            end = min(start + _BLOCKS_IN_PART, len(request.blocks))
            self._threads.submit(functools.partial(self._run_part, load, range(start, end), memory))

    def take_report(self) -> ConnectorOutput:
        """What ended since the last call."""
        with self._lock:
            report, self._report = self._report, ConnectorOutput()
            for request_id in (*report.finished_receiving, *report.failed_receiving):
                del self._active[request_id]
            return report

    def _run_part(self, load: _Load, indices: Sequence[int], memory: BlockMemory) -> None:
        done = 0
        began = time.perf_counter()
        try:
            for index in indices:
                if index >= load.first_bad or not self._load_block(load, index, memory):
                    break
                done += 1
        finally:
            self._stop_part(load, indices, done, time.perf_counter() - began)

    def _load_block(self, load: _Load, index: int, memory: BlockMemory) -> bool:
        block = load.request.blocks[index]
        failure = _read_block(self._directory, self._format, block, memory)
        if failure is None:
            return True
        kind, reason = failure
        with self._lock:
            self._report.stats.count_failure(kind)
        self._warnings.warn(kind, f"KV block {block.key.hex} could not be loaded: {reason}; it is recomputed")
        return False

    def _stop_part(self, load: _Load, indices: Sequence[int], done: int, seconds: float) -> None:
        with self._lock:
            if done < len(indices):
                load.first_bad = min(load.first_bad, indices[done])
            load.num_bytes += done * self._format.payload_bytes
            self._report.stats.num_blocks_loaded += done
            self._report.stats.num_bytes_loaded += done * self._format.payload_bytes
            self._report.stats.load_seconds += seconds
            load.num_running_parts -= 1
            if load.num_running_parts == 0:
                self._finish(load)

    def _finish(self, load: _Load) -> None:
        request_id = load.request.request_id
        self._report.received_bytes[request_id] = load.num_bytes
        if load.num_good_tokens == load.request.num_tokens:
            self._report.finished_receiving.add(request_id)
        else:
            self._report.failed_receiving[request_id] = load.num_good_tokens


def _read_block(
    directory: BlockDirectory, block_format: BlockFormat, block: BlockTransfer, memory: BlockMemory
) -> tuple[str, str] | None:
    """Read one block into place; kind and reason of the failure, or None. After a failure the block is zeros."""
    key = block.key
    try:
        with directory.open_for_reading(key) as fd:
            block_format.read(fd, key, memory.get_view(block.block_id))
            directory.note_use(fd)
        return None
    except InvalidBlockError as error:
        directory.remove(key)
        failure = (error.kind, f"its file is {error.kind} and was removed")
    except OSError as error:
        failure = (classify_os_error(error), error.strerror or str(error))
    memory.wipe(block.block_id)
    return failure
