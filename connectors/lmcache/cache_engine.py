"""One LMCache engine: asked, filled, emptied and closed.

Loads and lookups go through LMCache's engine. Saves go one level below, to the allocator and the back-ends that it
would call itself: its own `store` tells nobody what became of a write, and a promise to a decode engine needs that.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from lmcache.observability import LMCStatsMonitor
from lmcache.utils import CacheEngineKey
from lmcache.v1.cache_engine import LMCacheEngine
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

from pdserve.connectors.blocks.failures import Failure
from pdserve.connectors.lmcache.lmcache_parts import DigestDatabase
from pdserve.connectors.lmcache.retrieval import Retrieval
from pdserve.connectors.lmcache.shared_files import SharedFiles
from pdserve.kv_layout import BlockKey

_MAX_DISK_WRITES = 32
_STATISTICS_LIFE_S = 10.0
_DISCONNECT_TIMEOUT_S = 2.0


class CacheEngine:
    """An open LMCache engine. Any thread may use it; what may hang says so, and belongs into `DeadlineCalls`.

    Args:
        engine: LMCache's, with its back-ends open.
        database: makes its keys.
        max_writes: most values on their way to the shared back-end. The rest of LMCache's memory is left to reads:
            they wait for memory on the very thread that would finish the writes.
    """

    def __init__(self, engine: LMCacheEngine, database: DigestDatabase, max_writes: int) -> None:
        self._engine = engine
        self._database = database
        self._writes = threading.Semaphore(max_writes)
        backends = engine.storage_manager.storage_backends
        self._remote_name = next(name for name, backend in backends.items() if isinstance(backend, RemoteBackend))
        self._remote: RemoteBackend = backends[self._remote_name]
        self._cpu = backends["LocalCPUBackend"]
        self._disk = backends.get("LocalDiskBackend")
        self._disk_writes: list[CacheEngineKey] = []
        self._lock = threading.Lock()
        self._statistics_due = 0.0

    def count_stored_run(self, keys: Sequence[BlockKey]) -> int:
        """How many of ``keys`` are shared, up to the first that is not. May hang."""
        self._drop_statistics()
        return int(self._engine.lookup(tokens=_to_tokens(keys), search_range=[self._remote_name]))

    def has(self, key: BlockKey) -> bool:
        """Whether a block is shared. May hang."""
        return bool(self._remote.contains(self._database.build_key(key.digest)))

    def count_missing(self, keys: Sequence[BlockKey]) -> int:
        """How many of ``keys`` are not shared. May hang."""
        return sum(not self.has(key) for key in keys)

    def retrieve(self, keys: Sequence[BlockKey], retrieval: Retrieval) -> None:
        """Put what any tier has into ``retrieval``, up to the first block that none has. May hang."""
        self._drop_statistics()
        self._engine.retrieve(_to_tokens(keys), retrieval=retrieval)

    def begin_write(self, key: BlockKey, value: memoryview) -> Future[None] | Failure:
        """Copy a value and send it to all tiers; the future is the shared tier's. Never waits."""
        self._drop_statistics()
        cache_key = self._database.build_key(key.digest)
        if self._remote.connection is None:
            return Failure("unreachable", "LMCache could not open it")
        if self._remote.exists_in_put_tasks(cache_key) or not self._writes.acquire(blocking=False):
            return Failure("timeout", "earlier writes have not ended")
        memory_obj = self._allocate()
        if memory_obj is None:
            self._writes.release()
            return Failure("no_space", "LMCache's memory is full of blocks in use")
        try:
            self._engine.gpu_connector.from_gpu(memory_obj, 0, 1, value=value)
            future: Future[None] = self._remote.submit_put_task(cache_key, memory_obj)
            future.add_done_callback(lambda _: self._writes.release())
            self._cpu.batched_submit_put_task([cache_key], [memory_obj])
            if self._disk is not None and self._may_write_to_disk(cache_key):
                self._disk.submit_put_task(cache_key, memory_obj)
        finally:
            memory_obj.ref_count_down()
        return future

    def remove(self, key: BlockKey) -> None:
        """Remove a block from all tiers that can; LMCache's Redis back-end cannot. May hang."""
        self._engine.storage_manager.remove(self._database.build_key(key.digest))

    def close(self) -> None:
        """Close all tiers and end LMCache's threads. May hang."""
        if self._remote.connection is not None:
            connector = self._remote.connection.getWrappedConnector()
            if isinstance(connector, SharedFiles):
                connector.stop()
            else:
                self._disconnect_redis(connector)
        self._engine.close()
        manager = self._engine.storage_manager
        if not manager.thread.is_alive():
            manager.loop.close()

    def _disconnect_redis(self, connector: Any) -> None:
        executor = connector.pq_executor
        # The back-end awaits this method on the very loop that the method waits for.
        executor.shutdown = lambda wait=True: executor.shutdown_async(wait=False)
        closing = asyncio.run_coroutine_threadsafe(connector.pool.disconnect(), self._engine.storage_manager.loop)
        concurrent.futures.wait([closing], timeout=_DISCONNECT_TIMEOUT_S)

    def _allocate(self) -> Any:
        metadata = self._engine.metadata
        return self._engine.storage_manager.allocate(metadata.get_shapes(1), metadata.get_dtypes(), busy_loop=False)

    def _may_write_to_disk(self, cache_key: CacheEngineKey) -> bool:
        """Whether few enough writes are under way; one that failed counts for ever, for LMCache keeps it in mind."""
        with self._lock:
            self._disk_writes = [key for key in self._disk_writes if self._disk.exists_in_put_tasks(key)]
            if len(self._disk_writes) >= _MAX_DISK_WRITES:
                return False
            self._disk_writes.append(cache_key)
            return True

    def _drop_statistics(self) -> None:
        """LMCache notes every call until somebody collects its statistics."""
        with self._lock:
            now = time.monotonic()
            if now < self._statistics_due:
                return
            self._statistics_due = now + _STATISTICS_LIFE_S
        LMCStatsMonitor.GetOrCreate().get_stats_and_clear()


def _to_tokens(keys: Sequence[BlockKey]) -> list[int]:
    return [int.from_bytes(key.digest) for key in keys]
