"""Keeps the store below its limit by evicting what was used longest ago.

Every writing engine runs this for itself: it takes an inventory now and then, adds its own writes, and evicts when
the sum passes the limit. Two engines that evict at once remove the same oldest files; nothing is locked.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable

from pdserve.connectors.shared_storage.directory import BlockDirectory, StoredFile

logger = logging.getLogger(__name__)

_INVENTORY_INTERVAL_S = 30.0
_LOW_WATER = 0.9
_DEFAULT_SHARE = 4
_RESERVE_SHARE = 20
_FULL_DISK_ROOM_BLOCKS = 16


class CapacityKeeper:
    """Makes room for writes. Used by the writer threads.

    Args:
        directory: the store.
        max_bytes: the limit; None = a quarter of the file system, and at most what is free less a reserve of 5 %,
            looked at anew with each inventory.
        min_age_s: files younger than this go only when the limit cannot be kept otherwise.
        clock: monotonic seconds.
        wall_clock: seconds since the epoch, for files' ages.
    """

    def __init__(
        self,
        directory: BlockDirectory,
        *,
        max_bytes: int | None,
        min_age_s: float,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory = directory
        self._max_bytes = max_bytes
        self._min_age_s = min_age_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._used_bytes = 0
        self._limit_bytes = 0
        self._inventory_due = float("-inf")

    def make_room(self, num_bytes: int) -> None:
        """Evict until ``num_bytes`` more fit below the limit; called before a write, which is counted as done.

        Raises:
            OSError: the directory is gone.
        """
        with self._lock:
            if self._clock() >= self._inventory_due:
                self._take_inventory()
            if self._used_bytes + num_bytes > self._limit_bytes:
                files = self._take_inventory()
                young = self._evict(files, int(self._limit_bytes * _LOW_WATER) - num_bytes, self._min_age_s)
                self._evict(young, self._limit_bytes - num_bytes, 0.0)
            self._used_bytes += num_bytes

    def make_room_on_full_disk(self, file_bytes: int) -> bool:
        """The disk itself is full: remove the oldest blocks, however young; whether that freed anything.

        Raises:
            OSError: the directory is gone.
        """
        with self._lock:
            files = self._take_inventory()
            wanted = max(self._used_bytes - _FULL_DISK_ROOM_BLOCKS * file_bytes, 0)
            return len(self._evict(files, wanted, 0.0)) < len(files)

    def _take_inventory(self) -> list[StoredFile]:
        """Look at what is there, oldest first, and set the limit by it."""
        num_stale = self._directory.reap_stale_temps()
        if num_stale:
            logger.info("removed %d unfinished files of engines that died", num_stale)
        files = sorted(self._directory.list_files(), key=lambda file: file.mtime)
        self._used_bytes = sum(file.size_bytes for file in files)
        self._limit_bytes = self._get_limit()
        self._inventory_due = self._clock() + _INVENTORY_INTERVAL_S
        return files

    def _get_limit(self) -> int:
        if self._max_bytes is not None:
            return self._max_bytes
        total, free = self._directory.get_space()
        return max(min(total // _DEFAULT_SHARE, self._used_bytes + free - total // _RESERVE_SHARE), 0)

    def _evict(self, files: list[StoredFile], target_bytes: int, min_age_s: float) -> list[StoredFile]:
        """Remove files, oldest first, until the store takes ``target_bytes``; the files that stay."""
        youngest = self._wall_clock() - min_age_s
        num_removed = 0
        for file in files:
            if self._used_bytes <= target_bytes or file.mtime > youngest:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file.path)
            self._used_bytes -= file.size_bytes
            num_removed += 1
        if num_removed:
            logger.debug("evicted %d blocks from %s", num_removed, self._directory.root)
        return files[num_removed:]
