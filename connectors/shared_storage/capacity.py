"""Keeps the store below its limit: in a full one, a new block is written over the file that was used longest ago.

Overwriting is more than room: memory or disk blocks that a file has already cost the system nothing, new ones are most
of a write's time. A reader that still has the old file open finds other bytes than it came for, by the checksum.

Every writing engine runs this for itself: it takes an inventory now and then, adds its own writes, and takes a file
for each write when the sum passes the limit. Two engines never get one file, for it is moved first; nothing is locked.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from pdserve.connectors.blocks.failures import WarningLimiter
from pdserve.connectors.shared_storage.directory import BlockDirectory, StoredFile, UnpublishedFile
from pdserve.kv_layout import BlockKey

logger = logging.getLogger(__name__)

_INVENTORY_INTERVAL_S = 30.0
_DEFAULT_SHARE = 4
_RESERVE_SHARE = 20
# Some ten megabytes of names; the inventory is taken anew when they are used up.
_MAX_KNOWN_FILES = 1 << 16


class CapacityKeeper:
    """Where files for new blocks come from. Used by the writer threads; promises are the forward thread's.

    Args:
        directory: the store.
        max_bytes: the limit; None = a quarter of the file system, and at most what is free less a reserve of 5 %,
            looked at anew with each inventory.
        min_age_s: that a younger file has to go is told in the log: it may be on its way to a decode engine.
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
        self._file_bytes = directory.file_bytes
        self._max_bytes = max_bytes
        self._min_age_s = min_age_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._warnings = WarningLimiter(logger, clock)
        self._lock = threading.Lock()
        # A lock of its own: the forward thread takes it, and must not wait for an inventory.
        self._promises_lock = threading.Lock()
        self._promises: Counter[str] = Counter()
        self._oldest: deque[StoredFile] = deque()
        self._used_bytes = 0
        self._num_open = 0
        self._limit_bytes = 0
        self._inventory_due = float("-inf")

    def promise(self, keys: Sequence[BlockKey]) -> None:
        """Evict none of these before `release`."""
        with self._promises_lock:
            self._promises.update(key.hex for key in keys)

    def release(self, keys: Sequence[BlockKey]) -> None:
        """Forget one promise of each."""
        with self._promises_lock:
            for key in keys:
                self._promises[key.hex] -= 1
                if not self._promises[key.hex]:
                    del self._promises[key.hex]

    def prepare(self, num_files: int) -> None:
        """Take an inventory if one of the next ``num_files`` writes is likely to need it: it need not wait then."""
        with self._lock:
            is_full = self._used_bytes + num_files * self._file_bytes > self._limit_bytes
            is_old = self._clock() >= self._inventory_due - _INVENTORY_INTERVAL_S / 2
            if is_old or (is_full and len(self._oldest) < num_files):
                with contextlib.suppress(OSError):  # a write will tell
                    self._take_inventory()

    def open_file(self, key: BlockKey) -> UnpublishedFile:
        """A temporary file for ``key`` that fits below the limit: a new one, or that of an evicted block.

        It ends with `publish_file` or `discard_file`.

        Raises:
            OSError: no room, no permission, or the directory is gone.
        """
        while not self._take_room():
            victim = self._take_oldest()
            if victim is None:
                raise OSError(errno.ENOSPC, "every block in it is being written or promised to a hand-off under way")
            file = self._evict(victim, key)
            if file is not None:
                return file
        try:
            file = self._directory.create_file(key)
        except OSError:
            self._count(-self._file_bytes)
            raise
        self._count(0, num_open=1)
        return file

    def open_file_on_full_disk(self, key: BlockKey) -> UnpublishedFile | None:
        """The disk itself is full: the file of the block that was used longest ago, or None when there is none.

        Raises:
            OSError: the directory is gone.
        """
        while (victim := self._take_oldest()) is not None:
            file = self._evict(victim, key)
            if file is not None:
                return file
        return None

    def publish_file(self, file: UnpublishedFile) -> None:
        """Put a whole file in its key's place.

        Raises:
            OSError: it could not be closed or moved, and was discarded.
        """
        try:
            self._directory.publish_file(file)
        except OSError:
            self._count(-self._file_bytes, num_open=-1)
            raise
        self._count(0, num_open=-1)

    def discard_file(self, file: UnpublishedFile) -> None:
        """Remove a file that will not be published."""
        self._directory.discard_file(file)
        self._count(-self._file_bytes, num_open=-1)

    def _take_room(self) -> bool:
        """Count one block more if it fits below the limit, or if there is no other one; whether that was so."""
        with self._lock:
            if self._clock() >= self._inventory_due:
                self._take_inventory()
            fits = self._used_bytes + self._file_bytes <= self._limit_bytes or self._used_bytes <= 0
            if fits:
                self._used_bytes += self._file_bytes
            return fits

    def _take_oldest(self) -> StoredFile | None:
        """What to evict next; None when nothing is there that nobody is promised."""
        with self._lock:
            if not self._oldest:
                self._take_inventory()
            while self._oldest:
                file = self._oldest.popleft()
                if file.block not in self._promises:
                    return file
            return None

    def _evict(self, victim: StoredFile, key: BlockKey) -> UnpublishedFile | None:
        """The victim's file for ``key``; None when there is none.

        It was used since it was listed, or is gone (then another engine's block has its room), or had to go because
        the store is above its limit.
        """
        if self._directory.find_mtime(victim.path) != victim.mtime:
            return None
        self._warn_of_age(victim)
        if self._used_bytes > self._limit_bytes:
            self._directory.remove_file(victim)
            self._count(-victim.size_bytes)
            return None
        file = self._directory.reuse_file(victim, key)
        if file is not None:
            self._count(self._file_bytes - victim.size_bytes, num_open=1)
        return file

    def _count(self, num_bytes: int, *, num_open: int = 0) -> None:
        with self._lock:
            self._used_bytes += num_bytes
            self._num_open += num_open

    def _warn_of_age(self, victim: StoredFile) -> None:
        age_s = self._wall_clock() - victim.mtime
        if age_s < self._min_age_s:
            self._warnings.warn(
                "evicted",
                f"{self._directory.root} is too small: KV is evicted {max(age_s, 0.0):.1f} s after its last use, "
                "perhaps before it was loaded; raise max_bytes",
            )

    def _take_inventory(self) -> None:
        """Look at what is there, and set the limit by it."""
        num_stale = self._directory.reap_stale_temps()
        if num_stale:
            logger.info("removed %d unfinished files of engines that died", num_stale)
        files = sorted(self._directory.list_files(), key=lambda file: file.mtime)
        self._oldest = deque(files[:_MAX_KNOWN_FILES])
        self._used_bytes = sum(file.size_bytes for file in files) + self._num_open * self._file_bytes
        self._limit_bytes = self._get_limit()
        self._inventory_due = self._clock() + _INVENTORY_INTERVAL_S

    def _get_limit(self) -> int:
        if self._max_bytes is not None:
            return self._max_bytes
        total, free = self._directory.get_space()
        return max(min(total // _DEFAULT_SHARE, self._used_bytes + free - total // _RESERVE_SHARE), 0)
