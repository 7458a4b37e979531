"""Blocks as files: read straight into KV memory, written over old ones in a full store, every failure a kind."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Generator, Sequence

from pdserve.connectors.blocks.block_format import BlockFormat
from pdserve.connectors.blocks.block_memory import BlockMemory
from pdserve.connectors.blocks.failures import Failure, InvalidBlockError
from pdserve.connectors.blocks.messages import BlockTransfer
from pdserve.connectors.blocks.store import SealedBlock, WriteResult
from pdserve.connectors.shared_storage.block_file import read_block, write_all
from pdserve.connectors.shared_storage.capacity import CapacityKeeper
from pdserve.connectors.shared_storage.directory import BlockDirectory, UnpublishedFile
from pdserve.connectors.shared_storage.failures import classify_os_error
from pdserve.connectors.shared_storage.file_draft import FileDraft
from pdserve.kv_layout import BlockKey


class FileStore:
    """Used by reader and writer threads; `has` also by the forward thread.

    Args:
        directory: where files are.
        block_format: how they are verified.
        capacity: gives files to write to.
    """

    def __init__(self, directory: BlockDirectory, block_format: BlockFormat, capacity: CapacityKeeper) -> None:
        self.place = directory.root
        self.blocks_per_read = 4
        self.blocks_per_write = 4  # each file is a call of its own; a batch spares threads their words to each other
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

    def promise(self, keys: Sequence[BlockKey]) -> None:
        """Keep these files from being written over, as far as this engine is concerned."""
        self._capacity.promise(keys)

    def release(self, keys: Sequence[BlockKey]) -> None:
        """These files may be written over."""
        self._capacity.release(keys)

    def prepare(self, keys: Sequence[BlockKey]) -> Callable[[], None]:
        """Know what is there, and what can go."""
        return functools.partial(self._capacity.prepare, len(keys))

    def begin_draft(self, key: BlockKey) -> FileDraft:
        """Begin a file that nobody finds yet."""
        return FileDraft(self._format, self._capacity, key)

    def close(self) -> None:
        """Nothing is open between calls."""

    def _read_block(self, block: BlockTransfer, memory: BlockMemory) -> Failure | None:
        key = block.key
        try:
            with self._directory.open_for_reading(key) as fd:
                found = os.fstat(fd)
                try:
                    read_block(fd, found.st_size, self._format, key, memory.get_view(block.block_id))
                    self._directory.note_use(fd, found)
                    return None
                except InvalidBlockError as error:
                    failure = self._reject(key, found, error)
        except OSError as error:
            failure = classify_os_error(error)
        memory.wipe(block.block_id)
        return failure

    def _reject(self, key: BlockKey, found: os.stat_result, error: InvalidBlockError) -> Failure:
        """Remove a damaged file; one that is the key's no longer is not damaged, but another block's by now."""
        if not self._directory.is_file_of(key, found):
            return Failure("missing", "it was evicted while it was read")
        self._directory.remove(key)
        return Failure(error.kind, f"its file is {error.kind} and was removed")

    def _write_block(self, block: SealedBlock) -> Failure | None:
        try:
            self._fill(self._capacity.open_file(block.key), block.value)
        except OSError as error:
            failure = classify_os_error(error)
            return failure if failure.kind != "no_space" else self._write_on_full_disk(block, failure)
        return None

    def _write_on_full_disk(self, block: SealedBlock, failure: Failure) -> Failure | None:
        """Write over the oldest file, which takes no room that was not taken before."""
        try:
            file = self._capacity.open_file_on_full_disk(block.key)
            if file is None:
                return failure
            self._fill(file, block.value)
        except OSError as error:
            return classify_os_error(error)
        return None

    def _fill(self, file: UnpublishedFile, value: memoryview) -> None:
        try:
            write_all(file.fd, value, 0)
        except OSError:
            self._capacity.discard_file(file)
            raise
        self._capacity.publish_file(file)
