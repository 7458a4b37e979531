"""Who holds which KV block, for what and since when; and whether that adds up.

Every referenced block must be explained by holders: a request's table, a load whose request has ended, a send. A
block that is referenced more or less often than its holders say is a leak or a double free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from pdserve.engine.block_pool import BlockPool


class BlockHolding(msgspec.Struct, frozen=True):
    """One holder's blocks.

    Attributes:
        request_id: the engine's id of the request, which may have ended.
        purpose: ``running``, ``waiting``, ``loading``, ``orphaned_load`` or ``sending``.
        held_s: how long, in seconds.
        block_ids: the blocks, in order.
    """

    request_id: str
    purpose: str
    held_s: float
    block_ids: list[int]


class BlockReport(msgspec.Struct, frozen=True):
    """The pool at one moment.

    Attributes:
        num_blocks: in the pool.
        num_used_blocks: referenced by somebody.
        holdings: every holder.
        mistakes: what does not add up, in words; empty when all is well.
    """

    num_blocks: int
    num_used_blocks: int
    holdings: list[BlockHolding]
    mistakes: list[str]


def build_report(pool: BlockPool, holdings: Iterable[BlockHolding]) -> BlockReport:
    """Compare the pool's reference counts with what the holders say."""
    holdings = list(holdings)
    expected = Counter(block_id for holding in holdings for block_id in holding.block_ids)
    mistakes = [
        f"block {block_id} is referenced {found} times, its holders explain {expected[block_id]}"
        for block_id, found in enumerate(pool.ref_counts)
        if found != expected[block_id]
    ]
    return BlockReport(pool.num_blocks, pool.num_used_blocks, holdings, mistakes)
