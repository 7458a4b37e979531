"""Block tables: which blocks hold which request's KV, and prefix hits.

Owns the tables and talks to the block pool; knows token counts, not tensors. A shared block is never written:
only full blocks are shared, and a request always has at least one token left to compute behind its hits, so its
next write goes to a block of its own. No copy-on-write is needed for that reason.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.engine.block_pool import BlockPool
from pdserve.engine.request import Request


class KVCacheManager:
    """Block tables over one pool.

    Args:
        num_blocks: blocks in the pool.
        block_size: S, tokens in a block.
        enable_prefix_caching: whether full blocks are indexed and looked up.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        self._tables: dict[str, list[int]] = {}
        self._num_indexed: dict[str, int] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def get_block_ids(self, request_id: str) -> Sequence[int]:
        """The request's block table; empty when it holds nothing."""
        return self._tables.get(request_id, ())

    def find_prefix(self, request: Request) -> list[int]:
        """Blocks that hold the longest indexed prefix of the request's tokens.

        At least one token is left to compute, because its logits choose the next token. A request that wants
        logprobs of its prompt finds nothing: they come from computing it.
        """
        if not self._enable_prefix_caching or request.wants_prompt_logprobs:
            return []
        block_ids = []
        for digest in request.block_digests[: (request.num_tokens - 1) // self.block_size]:
            block_id = self.pool.get_cached_block(digest)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def can_admit(self, prefix_block_ids: Sequence[int], num_tokens: int) -> bool:
        """Whether a table for ``num_tokens`` tokens that starts with these hits fits into the pool now."""
        num_new = self.num_blocks_for(num_tokens) - len(prefix_block_ids)
        num_revived = sum(self.pool.is_free(block_id) for block_id in prefix_block_ids)
        return num_new + num_revived <= self.pool.num_free_blocks

    def admit(self, request_id: str, prefix_block_ids: Sequence[int], num_tokens: int) -> None:
        """Give a request its first table: prefix hits, then new blocks up to ``num_tokens`` tokens.

        The caller has asked ``can_admit``.
        """
        assert request_id not in self._tables, f"request {request_id} is admitted twice"
        self.pool.touch(prefix_block_ids)
        new_ids = self.pool.allocate(self.num_blocks_for(num_tokens) - len(prefix_block_ids))
        self._tables[request_id] = [*prefix_block_ids, *new_ids]
        self._num_indexed[request_id] = len(prefix_block_ids)

    def grow(self, request_id: str, num_tokens: int) -> bool:
        """Extend the table to ``num_tokens`` tokens; False, and nothing changed, when the pool has too few."""
        table = self._tables[request_id]
        num_new = self.num_blocks_for(num_tokens) - len(table)
        if num_new > self.pool.num_free_blocks:
            return False
        if num_new > 0:
            table.extend(self.pool.allocate(num_new))
        return True

    def index_computed_blocks(self, request: Request) -> None:
        """Index the request's blocks that its computed tokens fill; called once their KV stands there."""
        if not self._enable_prefix_caching:
            return
        num_full, num_indexed = request.num_computed_tokens // self.block_size, self._num_indexed[request.request_id]
        if num_full <= num_indexed:
            return
        table = self._tables[request.request_id]
        for i in range(num_indexed, num_full):
            self.pool.set_digest(table[i], request.block_digests[i])
        self._num_indexed[request.request_id] = num_full

    def free(self, request_id: str) -> None:
        """The request lets go of its blocks; nothing happens when it holds none."""
        self.pool.free(self._tables.pop(request_id, ()))
        self._num_indexed.pop(request_id, None)

    def detach(self, request_id: str) -> list[int]:
        """The request ends but its blocks stay referenced; the caller frees them through the pool later."""
        self._num_indexed.pop(request_id, None)
        return self._tables.pop(request_id, [])

    def count_allocated_slots(self) -> int:
        """Token slots in all tables, shared blocks counted for each holder."""
        return sum(len(table) for table in list(self._tables.values())) * self.block_size
