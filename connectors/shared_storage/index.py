"""What the directory holds for a request: one `stat` a block, no reading."""

from __future__ import annotations

from pdserve.connectors.base import KVRequest
from pdserve.connectors.shared_storage.directory import BlockDirectory


class DirectoryIndex:
    """Lives on the scheduler's thread and keeps nothing.

    Args:
        directory: the store.
    """

    def __init__(self, directory: BlockDirectory) -> None:
        self._directory = directory

    def count_stored_run(self, request: KVRequest, start: int) -> int:
        """How many blocks from ``start`` on have a whole file, without a gap."""
        for index in range(start, len(request.block_keys)):
            if not self._directory.has(request.block_keys[index]):
                return index - start
        return max(len(request.block_keys) - start, 0)

    def forget(self, request_id: str) -> None:
        """Nothing was kept."""

    def close(self) -> None:
        """Nothing is held."""
