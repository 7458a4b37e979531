"""What the scheduler half tells the worker halves each step: plain data, small and in order."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdserve.connectors.base import KVRequest
from pdserve.kv_layout import BlockKey


class BlockTransfer(msgspec.Struct, frozen=True, array_like=True):
    """One block on its way.

    Attributes:
        digest: the key's digest.
        num_tokens: tokens that the key covers; the slots behind them are not part of it.
        block_id: where it lies in KV memory.
    """

    digest: bytes
    num_tokens: int
    block_id: int

    @property
    def key(self) -> BlockKey:
        """Identity of the content."""
        return BlockKey(self.digest, self.num_tokens)


class LoadRequest(msgspec.Struct, frozen=True):
    """Fill blocks of one request.

    Attributes:
        request_id: whose.
        num_tokens: tokens that the engine counts on; the last block may hold more.
        blocks: in the order of the request's tokens.
    """

    request_id: str
    num_tokens: int
    blocks: list[BlockTransfer]


class SaveRequest(msgspec.Struct, frozen=True):
    """Save blocks of one request; their KV stands in memory after the step's forward pass."""

    request_id: str
    blocks: list[BlockTransfer]


class StepMetadata(msgspec.Struct, frozen=True):
    """One step's message.

    Attributes:
        loads: to begin before the forward pass.
        saves: to copy out after it.
        forgotten_request_ids: requests that ended without a report of their sending.
        has_tokens: the step computes something.
    """

    loads: list[LoadRequest] = []
    saves: list[SaveRequest] = []
    forgotten_request_ids: list[str] = []
    has_tokens: bool = False


def pair_blocks(request: KVRequest, block_ids: Sequence[int], start: int, end: int) -> list[BlockTransfer]:
    """Keys ``start`` to ``end`` of the prompt with the blocks where they lie.

    A count that goes beyond the keys gives a load that ends early, which is reported as a failure.
    """
    pairs = zip(request.block_keys[start:end], block_ids[start:end], strict=False)
    return [BlockTransfer(key.digest, key.num_tokens, block_id) for key, block_id in pairs]
