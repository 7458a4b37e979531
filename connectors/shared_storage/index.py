"""What the directory holds for a request: one `stat` a block and rank, no reading."""

from __future__ import annotations

from pdserve.connectors.base import KVRequest
from pdserve.connectors.shared_storage.directory import BlockDirectory
from pdserve.kv_layout import BlockKey, Rank


class DirectoryIndex:
    """Lives on the scheduler's thread and keeps nothing.

    Args:
        directory: the store, as ``rank`` sees it.
        rank: the scheduler half's; a block is stored when the shares of all ranks of its engine are.
    """

    def __init__(self, directory: BlockDirectory, rank: Rank) -> None:
        self._directory = directory
        self._other_ranks = [other for other in rank.all_ranks if other != rank]

    def count_stored_run(self, request: KVRequest, start: int) -> int:
        """How many blocks from ``start`` on have a whole file, without a gap."""
        for index in range(start, len(request.block_keys)):
            if not self._has(request.block_keys[index]):
                return index - start
        return max(len(request.block_keys) - start, 0)

    def forget(self, request_id: str) -> None:
        """Nothing was kept."""

    def close(self) -> None:
        """Nothing is held."""

    def _has(self, key: BlockKey) -> bool:
        directory, others = self._directory, self._other_ranks
        return directory.has(key) and (not others or directory.has_shares(key, others))
