"""The harness's pool of blocks, over the memory of every rank.

Blocks carry poison whenever they hold nothing, so that what a connector reads or writes at the wrong time shows::

    free ──allocate──> UNCOMPUTED ──fill──> a prompt's KV ──free──> FREED
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pdserve.connectors.testing.kv_content import Bytes
from pdserve.connectors.testing.kv_share import KVShare
from pdserve.connectors.testing.violations import RuleViolationError


class BlockMemory:
    """A pool of blocks. Whatever is done to a block is done to each rank's share of it.

    Args:
        shares: the ranks' memory, in their order.
        num_blocks: size of the pool.
    """

    def __init__(self, shares: Sequence[KVShare], num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.shares = shares
        self._free = list(range(num_blocks))
        self._rule_of_last_owner = dict.fromkeys(range(num_blocks), "R9")

    @property
    def kv_cache(self) -> torch.Tensor:
        """The first rank's, ``[B, L, 2, K, S, H]``."""
        return self.shares[0].kv_cache

    @property
    def num_used_blocks(self) -> int:
        """Blocks that somebody owns."""
        return self.num_blocks - len(self._free)

    def allocate(self, num_blocks: int) -> list[int]:
        """Blocks for a request, with poison inside."""
        block_ids = [self._free.pop() for _ in range(num_blocks)]
        for share in self.shares:
            share.poison_uncomputed(block_ids)
        return block_ids

    def free(self, block_ids: Sequence[int], rule: str) -> None:
        """Take blocks back and poison them; who writes to them from now on breaks ``rule``."""
        for share in self.shares:
            share.poison_freed(block_ids)
        self._free.extend(block_ids)
        self._rule_of_last_owner.update(dict.fromkeys(block_ids, rule))

    def check_free_blocks(self) -> None:
        """Nobody has written to a block that nobody owns.

        Raises:
            RuleViolationError: somebody has; under the rule given when the block was freed.
        """
        for share in self.shares:
            block_id = share.find_touched(self._free)
            if block_id is not None:
                rule = self._rule_of_last_owner[block_id]
                raise RuleViolationError(rule, f"block {block_id} was written to after it was free")

    def read_block(self, block_id: int) -> Bytes:
        """The first rank's bytes of a block, ``[L·2·K, S, H bytes]``."""
        return self.shares[0].read_block(block_id)

    def fill(
        self, block_ids: Sequence[int], token_ids: Sequence[int], positions: range, salt: str, layer: int | None = None
    ) -> None:
        """Compute the KV of ``positions``, of one layer of each rank or of all."""
        for share in self.shares:
            share.fill(block_ids, token_ids, positions, salt, layer)

    def find_wrong(self, block_ids: Sequence[int], token_ids: Sequence[int], positions: range, salt: str) -> int | None:
        """The first of ``positions`` whose bytes are not what the model computes, in any rank."""
        found = (share.find_wrong(block_ids, token_ids, positions, salt) for share in self.shares)
        return min((position for position in found if position is not None), default=None)

    def find_written(self, block_ids: Sequence[int], positions: range) -> int | None:
        """The first of ``positions`` that holds neither zeros nor the poison of this pool, in any rank."""
        found = (share.find_written(block_ids, positions) for share in self.shares)
        return min((position for position in found if position is not None), default=None)

    def explain_wrong(
        self, block_ids: Sequence[int], token_ids: Sequence[int], position: int, salt: str, *, holds_blocks: bool
    ) -> tuple[str | None, str]:
        """Where wrong bytes come from, and the rule that it breaks; None when only the test knows.

        Args:
            block_ids: of the request.
            token_ids: its tokens.
            position: of the token.
            salt: of the request.
            holds_blocks: the connector's producers hold blocks until they are fetched.
        """
        at = range(position, position + 1)
        wrong = [share for share in self.shares if share.find_wrong(block_ids, token_ids, at, salt) is not None]
        if len(wrong) < len(self.shares):
            return "R12", f"{len(wrong)} of {len(self.shares)} ranks do not have their share of it"
        found = (share.explain_wrong(block_ids, position, holds_blocks=holds_blocks) for share in wrong)
        return next((why for why in found if why is not None), (None, "it is not what the model computes"))
