"""Blocks as files: reads straight into KV memory, writes with room made, every failure of the disk a kind."""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence

from pdserve.connectors.blocks.block_format import BlockFormat
from pdserve.connectors.blocks.block_memory import BlockMemory
from pdserve.connectors.blocks.failures import Failure, InvalidBlockError
from pdserve.connectors.blocks.messages import BlockTransfer
from pdserve.connectors.blocks.store import SealedBlock, WriteResult
from pdserve.connectors.shared_storage.block_file import read_block, write_all
from pdserve.connectors.shared_storage.capacity import CapacityKeeper
from pdserve.connectors.shared_storage.directory import BlockDirectory
from pdserve.connectors.shared_storage.failures import classify_os_error
from pdserve.connectors.shared_storage.file_draft import FileDraft
from pdserve.kv_layout import BlockKey


class FileStore:
    """Used by reader and writer threads; `has` also by the forward thread.

    Args:
        directory: where files are.
        block_format: how they are verified.
        capacity: makes room.
    """

    def __init__(self, directory: BlockDirectory, block_format: BlockFormat, capacity: CapacityKeeper) -> None:
        self.place = directory.root
        self.blocks_per_read = 8
        self.blocks_per_write = 1  # a batch would gain nothing: each file is a call of its own
        self._directory = directory
        self._format = block_format
        self._capacity = capacity

    def has(self, key: BlockKey) -> bool:
        """Whether a whole file is there; eviction spares it from now on."""
        return self._directory.refresh(key)

    def read(self, blocks: Sequence[BlockTransfer], memory: BlockMemory) -> Generator[Failure | None]:
        """Read file after file."""
        for block in blocks:
            yield self._read_block(block, memory)

    def write(self, blocks: Sequence[SealedBlock]) -> list[WriteResult]:
        """Write file after file."""
        return [WriteResult(self._write_block(block)) for block in blocks]

    def begin_draft(self, key: BlockKey) -> FileDraft:
        """Begin a file that nobody finds yet."""
        return FileDraft(self._directory, self._format, self._capacity, key)

    def close(self) -> None:
        """Nothing is open between calls."""

    def _read_block(self, block: BlockTransfer, memory: BlockMemory) -> Failure | None:
        key = block.key
        try:
            with self._directory.open_for_reading(key) as fd:
                read_block(fd, self._format, key, memory.get_view(block.block_id))
                self._directory.note_use(fd)
            return None
        except InvalidBlockError as error:
            self._directory.remove(key)
            failure = Failure(error.kind, f"its file is {error.kind} and was removed")
        except OSError as error:
            failure = classify_os_error(error)
        memory.wipe(block.block_id)
        return failure

    def _write_block(self, block: SealedBlock) -> Failure | None:
        try:
            self._capacity.make_room(self._format.value_bytes)
            self._publish(block)
        except OSError as error:
            return classify_os_error(error)
        return None

    def _publish(self, block: SealedBlock) -> None:
        write = functools.partial(write_all, data=block.value)
        try:
            self._directory.publish(block.key, write)
        except OSError as error:
            if classify_os_error(error).kind != "no_space":
                raise
            if not self._capacity.make_room_on_full_disk(self._format.value_bytes):
                raise
            self._directory.publish(block.key, write)
