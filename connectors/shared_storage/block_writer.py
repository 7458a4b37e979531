"""Writes one block: makes room, publishes, and turns every failure of the disk into a kind."""

from __future__ import annotations

import functools

from pdserve.connectors.shared_storage.block_file import BlockFormat
from pdserve.connectors.shared_storage.capacity import CapacityKeeper
from pdserve.connectors.shared_storage.directory import BlockDirectory
from pdserve.connectors.shared_storage.failures import Backoff, WarningLimiter, classify_os_error
from pdserve.kv_layout import BlockKey


class BlockWriter:
    """Used by the writer threads.

    Args:
        directory: where files go.
        block_format: how they are written.
        capacity: makes room.
        backoff: pauses writing after a failure.
        warnings: log lines for people.
    """

    def __init__(
        self,
        directory: BlockDirectory,
        block_format: BlockFormat,
        capacity: CapacityKeeper,
        backoff: Backoff,
        warnings: WarningLimiter,
    ) -> None:
        self._directory = directory
        self._format = block_format
        self._capacity = capacity
        self._backoff = backoff
        self._warnings = warnings

    def write(self, key: BlockKey, payload: memoryview) -> str | None:
        """Save one block; the kind of the failure, or None."""
        paused = self._backoff.get_reason()
        if paused is not None:
            return paused
        try:
            self._capacity.make_room(self._format.file_bytes)
            self._publish(key, payload)
        except OSError as error:
            kind = classify_os_error(error)
            self._backoff.count_failure(kind)
            reason = error.strerror or str(error)
            self._warnings.warn(kind, f"KV cannot be saved to {self._directory.root}: {reason}; will try again")
            return kind
        self._backoff.count_success()
        return None

    def _publish(self, key: BlockKey, payload: memoryview) -> None:
        write = functools.partial(self._format.write, key=key, payload=payload)
        try:
            self._directory.publish(key, write)
        except OSError as error:
            if classify_os_error(error) != "no_space":
                raise
            if not self._capacity.make_room_on_full_disk(self._format.file_bytes):
                raise
            self._directory.publish(key, write)
