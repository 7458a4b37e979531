"""The pool of KV blocks: reference counts, the free queue in eviction order, the prefix index.

Owns which block is free, who shares it and which content it holds. It knows nothing of requests or tensors.

A block's life::

    free, no content ── allocate ──> referenced ── set_digest ──> referenced, indexed
          ^                               │                             │
          │                          free (count 0)                free (count 0)
          └───────────────────────────────┘        free, indexed <──────┘
                                                     │       └── touch (prefix hit) ──> referenced, indexed
                                                     └── allocate (evicts the content) ──> referenced
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from pdserve.engine.cache_events import CacheEventLog


class BlockPool:
    """Fixed number of equal blocks.

    Args:
        num_blocks: blocks in the pool, ids ``0 … num_blocks - 1``.

    Attributes:
        events: how the index changed, for routers that choose by it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        # Least recently freed first: the next one to be given away.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.events = CacheEventLog(max_events=num_blocks)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody references; indexed ones among them can still be hit."""
        return len(self._free)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that somebody references."""
        return self.num_blocks - len(self._free)

    @property
    def ref_counts(self) -> Sequence[int]:
        """How many hold each block, by block id."""
        return self._ref_counts

    @property
    def num_cached_blocks(self) -> int:
        """Blocks whose content the prefix index knows."""
        return len(self._index)

    @property
    def cached_digests(self) -> Iterable[bytes]:
        """The contents that the prefix index knows."""
        return self._index.keys()

    def get_cached_block(self, digest: bytes) -> int | None:
        """The block that holds this content, or None."""
        return self._index.get(digest)

    def is_free(self, block_id: int) -> bool:
        """Whether nobody references the block."""
        return self._ref_counts[block_id] == 0

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks for writing; the contents they held are forgotten.

        The caller has checked ``num_free_blocks``.
        """
        assert count <= len(self._free), "allocate without asking for free blocks first"
        block_ids = []
        for _ in range(count):
            block_id, _ = self._free.popitem(last=False)
            self._forget(block_id)
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def touch(self, block_ids: Iterable[int]) -> None:
        """One more holder for each block."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                del self._free[block_id]
            self._ref_counts[block_id] += 1

    def free(self, block_ids: Sequence[int]) -> None:
        """One holder fewer for each block of a table; the table's last block is given away first.

        A sequence's tail is worth least: it can be hit only after all that stands before it.
        """
        for block_id in reversed(block_ids):
            assert self._ref_counts[block_id] > 0, f"block {block_id} freed twice"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._free[block_id] = None
                if self._digests[block_id] is None:
                    self._free.move_to_end(block_id, last=False)

    def set_digest(self, block_id: int, digest: bytes) -> None:
        """The block is full and its content has this identity.

        Where another block holds the same content already, that one stays the indexed one.
        """
        if digest not in self._index:
            self._index[digest] = block_id
            self._digests[block_id] = digest
            self.events.note_stored(digest)

    def reset_index(self) -> None:
        """Forget all contents."""
        self._index.clear()
        self._digests = [None] * self.num_blocks
        self.events.note_cleared()

    def check(self) -> None:
        """Assert the pool's invariants; for tests and debugging."""
        assert all((count == 0) == (i in self._free) for i, count in enumerate(self._ref_counts))
        assert all(self._digests[i] == digest for digest, i in self._index.items())
        assert sum(d is not None for d in self._digests) == len(self._index)

    def _forget(self, block_id: int) -> None:
        digest = self._digests[block_id]
        if digest is not None:
            del self._index[digest]
            self._digests[block_id] = None
            self.events.note_evicted(digest)
