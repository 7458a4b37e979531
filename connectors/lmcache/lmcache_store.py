"""Blocks as LMCache's values: reads and writes in batches, each with a deadline, every failure a kind."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import OrderedDict
from collections.abc import Generator, Sequence
from concurrent.futures import Future

import redis

from pdserve.connectors.base import ConnectorContext
from pdserve.connectors.blocks.block_format import BlockFormat
from pdserve.connectors.blocks.block_memory import BlockMemory
from pdserve.connectors.blocks.failures import Backoff, Failure
from pdserve.connectors.blocks.messages import BlockTransfer
from pdserve.connectors.blocks.store import SealedBlock, WriteResult
from pdserve.connectors.lmcache.deadline_calls import CallFailedError, DeadlineCalls
from pdserve.connectors.lmcache.directories import EngineDirectories
from pdserve.connectors.lmcache.opening import count_pool_blocks, open_for_transfers
from pdserve.connectors.lmcache.options import LMCacheOptions
from pdserve.connectors.lmcache.retrieval import Retrieval
from pdserve.connectors.shared_storage.failures import classify_os_error
from pdserve.errors import ConfigError
from pdserve.kv_layout import BlockKey

_MAX_BATCH_BLOCKS = 32
_MAX_SUSPECTS = 4096
_CLOSE_TIMEOUT_S = 5.0


class LMCacheStore:
    """Used by reader and writer threads, which wait for LMCache no longer than ``timeout_s``.

    Args:
        context: the engine.
        options: where, and how long to wait.

    Raises:
        ConfigError: LMCache cannot be started.
    """

    def __init__(self, context: ConnectorContext, options: LMCacheOptions) -> None:
        self._format = BlockFormat(context.identity, context.spec, context.rank)
        self._timeout_s = options.timeout_s
        self._backoff = Backoff(time.monotonic)
        # Readers only wait here: it is LMCache's threads that step back, unless a hand-off waits for what they write.
        nice = 0 if options.saves_as(context.role) else options.reader_nice
        self._calls = DeadlineCalls("lmcache-call", options.num_calls, nice=nice)
        self._directories = EngineDirectories(options, can_write=True)
        try:
            self._engine = open_for_transfers(context, options, self._directories, self._calls)
        except ConfigError:
            self._directories.remove()
            raise
        self._suspects: OrderedDict[bytes, None] = OrderedDict()
        # Half of LMCache's memory is for reads, those included that were given up.
        num_blocks = count_pool_blocks(options, self._format.value_bytes) // 2
        self.place = f"LMCache at {options.url}"
        self.blocks_per_read = max(min(num_blocks // options.num_calls, _MAX_BATCH_BLOCKS), 1)
        self.blocks_per_write = max(min(num_blocks // options.writer_threads, _MAX_BATCH_BLOCKS), 1)
        self._is_closed = False

    def has(self, key: BlockKey) -> bool:
        """Not known without asking; `write` asks for many at once."""
        return False

    def read(self, blocks: Sequence[BlockTransfer], memory: BlockMemory) -> Generator[Failure | None]:
        """Have LMCache fetch all, and look at each; a block that fails does not touch KV memory before it is wiped."""
        paused = self._backoff.get_reason()
        if paused is not None:
            yield Failure(paused, "LMCache failed a moment ago")
            return
        retrieval = Retrieval(blocks, memory, self._format)
        common = self._retrieve([block.key for block in blocks], retrieval)
        for block, outcome in zip(blocks, retrieval.get_outcomes(), strict=True):
            if outcome is not None:
                memory.wipe(block.block_id)
                if common is None:
                    self._distrust(block.key)
            yield None if outcome is None else common or outcome

    def write(self, blocks: Sequence[SealedBlock]) -> list[WriteResult]:
        """Ask which are shared already, send the others to all tiers, and wait for the shared one."""
        deadline = time.monotonic() + self._timeout_s
        self._directories.restore()
        try:
            are_stored = self._calls.run(functools.partial(self._find_stored, blocks), self._timeout_s)
        except CallFailedError as error:
            return [WriteResult(error.failure)] * len(blocks)
        writes = [
            None if is_stored else self._engine.begin_write(block.key, block.value)
            for block, is_stored in zip(blocks, are_stored, strict=True)
        ]
        results = [_wait_for(write, deadline) for write in writes]
        for block, result in zip(blocks, results, strict=True):
            if result.failure is None:
                self._suspects.pop(block.key.digest, None)
        return results

    def count_missing(self, keys: Sequence[BlockKey]) -> int:
        """How many of these are not shared any more; all of them, if LMCache does not answer."""
        try:
            return self._calls.run(functools.partial(self._engine.count_missing, keys), self._timeout_s)
        except CallFailedError:
            return len(keys)

    def close(self) -> None:
        """End LMCache's threads and remove this engine's own directories; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._calls.close_after(self._engine.close, _CLOSE_TIMEOUT_S)
            self._directories.remove()

    def _retrieve(self, keys: Sequence[BlockKey], retrieval: Retrieval) -> Failure | None:
        """Fill ``retrieval``; what kept LMCache as a whole from doing so."""
        try:
            self._calls.run(functools.partial(self._engine.retrieve, keys, retrieval), self._timeout_s)
        except CallFailedError as error:
            retrieval.abandon()
            self._backoff.count_failure(error.failure.kind)
            return error.failure
        self._backoff.count_success()
        return None

    def _find_stored(self, blocks: Sequence[SealedBlock]) -> list[bool]:
        return [block.key.digest not in self._suspects and self._engine.has(block.key) for block in blocks]

    def _distrust(self, key: BlockKey) -> None:
        """Remove a block that could not be read, and write it anew should it come by where it cannot be removed."""
        self._suspects[key.digest] = None
        if len(self._suspects) > _MAX_SUSPECTS:
            self._suspects.popitem(last=False)
        with contextlib.suppress(CallFailedError):
            self._calls.run(functools.partial(self._engine.remove, key), self._timeout_s)


def _wait_for(write: Future[None] | Failure | None, deadline: float) -> WriteResult:
    if write is None:
        return WriteResult(was_there=True)
    if isinstance(write, Failure):
        return WriteResult(write)
    try:
        error = write.exception(max(deadline - time.monotonic(), 0.0))
    except TimeoutError:
        return WriteResult(Failure("timeout", "LMCache did not write in time"))
    return WriteResult(None if error is None else _classify(error))


def _classify(error: BaseException) -> Failure:
    if isinstance(error, OSError):
        return classify_os_error(error)
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return Failure("no_space", str(error))
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError)):
        return Failure("unreachable", str(error))
    return Failure("io", f"{type(error).__name__}: {error}")
