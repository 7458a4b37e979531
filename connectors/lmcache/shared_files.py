"""LMCache's back-end for files, with one call on a thread where LMCache's own makes three or four.

LMCache's own opens, reads or writes, closes and renames a file in calls that each go from its event loop to a thread
and back, which takes longer than moving the bytes. Names and contents of the files are the same, so either reads what
the other has written. LMCache finds the class by its name, as a plug-in of a deployment's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.storage_backend.connector.fs_connector import FSConnector

PLUGIN_NAME = "pdserve"
NUM_THREADS_SETTING = "pdserve_file_threads"


class SharedFiles(FSConnector):
    """Built by LMCache, which runs its coroutines on an event loop; files are read and written on threads of its own.

    Args:
        kwargs: what LMCache gives its own; the number of threads is in the configuration's ``extra_config``.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        num_threads = kwargs["config"].extra_config[NUM_THREADS_SETTING]
        self._threads = ThreadPoolExecutor(num_threads, "lmcache-file")

    def support_batched_get(self) -> bool:
        """A batch is read by one thread: whoever wants more side by side asks for several."""
        return True

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        """What is stored, in LMCache's memory, or None."""
        return (await self.batched_get([key]))[0]

    async def batched_get(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        """What is stored of each, up to the first that is not."""
        reading = self._threads.submit(self._read_run, keys)
        try:
            return await asyncio.wrap_future(reading)
        except asyncio.CancelledError:
            reading.add_done_callback(_give_back)
            raise

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        """Write a file, whole or not at all.

        Raises:
            OSError: it could not be written.
        """
        await asyncio.wrap_future(self._threads.submit(self._write, key, memory_obj))

    def stop(self) -> None:
        """Drop what has not begun and wait for the rest: LMCache frees its memory before it closes this. May hang."""
        self._threads.shutdown(cancel_futures=True)

    def _read_run(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        found: list[MemoryObj | None] = [None] * len(keys)
        for index, key in enumerate(keys):
            found[index] = self._read(key)
            if found[index] is None:
                break
        return found

    def _read(self, key: CacheEngineKey) -> MemoryObj | None:
        memory_obj = self.local_cpu_backend.allocate(self.meta_shapes, self.meta_dtypes, self.meta_fmt)
        if memory_obj is None:
            return None
        try:
            with open(self._get_file_path(key), "rb") as file:
                num_bytes = file.readinto(memory_obj.byte_array)
            return self.reshape_partial_chunk(memory_obj, num_bytes)
        except (OSError, ValueError):  # ValueError: its length is no value's
            memory_obj.ref_count_down()
            return None

    def _write(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        path, unfinished = self._get_file_and_tmp_path(key)
        try:
            with open(unfinished, "wb") as file:
                file.write(memory_obj.byte_array)
            os.replace(unfinished, path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise


def _give_back(reading: Future[list[MemoryObj | None]]) -> None:
    """Free the memory of values that nobody waits for any more."""
    if not reading.cancelled() and reading.exception() is None:
        for memory_obj in filter(None, reading.result()):
            memory_obj.ref_count_down()
