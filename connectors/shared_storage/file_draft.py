"""One block's file, written piece by piece while the block is still being computed."""

from __future__ import annotations

from pdserve.connectors.blocks.block_format import HEADER_BYTES, BlockFormat
from pdserve.connectors.shared_storage.block_file import write_all
from pdserve.connectors.shared_storage.capacity import CapacityKeeper
from pdserve.connectors.shared_storage.directory import UnpublishedFile
from pdserve.kv_layout import BlockKey


class FileDraft:
    """A temporary file: the payload first, then the header in the room before it, then its name.

    See `pdserve.connectors.blocks.store.BlockDraft`. Used by one writer thread at a time.

    Args:
        block_format: makes the header.
        capacity: gives the file.
        key: the block's.
    """

    def __init__(self, block_format: BlockFormat, capacity: CapacityKeeper, key: BlockKey) -> None:
        self._capacity = capacity
        self._format = block_format
        self._checksum = block_format.start_checksum(key)
        self._end = HEADER_BYTES
        self._file: UnpublishedFile | None = None
        try:
            self._file = capacity.open_file(key)
        except OSError:
            self.abandon()

    def append(self, piece: memoryview) -> None:
        """Write the next piece behind what is there."""
        if self._file is None:
            return
        self._checksum.update(piece)
        try:
            write_all(self._file.fd, piece, self._end)
            self._end += len(piece)
        except OSError:
            self.abandon()

    def publish(self) -> bool:
        """Write the header, and give the file its name."""
        file, self._file = self._file, None
        if file is None:
            return False
        try:
            write_all(file.fd, memoryview(self._format.build_header(file.key, self._checksum)), 0)
        except OSError:
            self._capacity.discard_file(file)
            return False
        try:
            self._capacity.publish_file(file)
        except OSError:
            return False
        return True

    def abandon(self) -> None:
        """Remove the file."""
        file, self._file = self._file, None
        if file is not None:
            self._capacity.discard_file(file)
