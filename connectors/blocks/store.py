"""What a store of blocks is to the shared halves: an index beside the scheduler, reads and writes beside the runner.

Two processes' views of the same thing; they share no object.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from pdserve.connectors.base import KVRequest
from pdserve.connectors.blocks.failures import Failure
from pdserve.connectors.blocks.messages import BlockTransfer
from pdserve.kv_layout import BlockKey

if TYPE_CHECKING:
    from pdserve.connectors.blocks.block_memory import BlockMemory


class BlockIndex(Protocol):
    """What is stored. Used by the scheduler's thread; never blocks for long."""

    def count_stored_run(self, request: KVRequest, start: int) -> int | None:
        """How many of the request's blocks from ``start`` on are stored without a gap; None = ask again next step.

        May be called any number of times for a request. A store that cannot be reached holds nothing.
        """
        ...

    def forget(self, request_id: str) -> None:
        """The request was admitted or has ended: what was learned for it is of no more use."""
        ...

    def close(self) -> None:
        """Release everything; idempotent."""
        ...


@dataclass(frozen=True, slots=True)
class SealedBlock:
    """A block to store.

    Attributes:
        key: its identity.
        value: header and payload; the buffer is reused after the write.
    """

    key: BlockKey
    value: memoryview


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What became of a write.

    Attributes:
        failure: why the block is not stored; None when it is.
        was_there: it was stored already, and nothing was written.
    """

    failure: Failure | None = None
    was_there: bool = False


class BlockStore(Protocol):
    """Reads and writes. Thread-safe; failures are data.

    Attributes:
        place: where the blocks lie, for people; no secrets.
        blocks_per_read: how many blocks a reader thread is given at once.
        blocks_per_write: most blocks that a writer thread is given at once.
    """

    place: str
    blocks_per_read: int
    blocks_per_write: int

    def has(self, key: BlockKey) -> bool:
        """Whether a block is known to be stored, so that it need not be copied; also notes its use.

        Called on the forward thread: a store that would have to ask over a network answers False, and skips what is
        there when it writes.
        """
        ...

    def read(self, blocks: Sequence[BlockTransfer], memory: BlockMemory) -> Generator[Failure | None]:
        """Read blocks into memory, in order; for each, why it failed, or None. Called on reader threads.

        A block that failed is left as zeros. The caller stops at the first failure.
        """
        ...

    def write(self, blocks: Sequence[SealedBlock]) -> Sequence[WriteResult]:
        """Store blocks, each whole or not at all; one result for each. Called on writer threads."""
        ...

    def close(self) -> None:
        """Release everything; idempotent. No other call is under way, unless one hangs."""
        ...


@runtime_checkable
class PreparingStore(Protocol):
    """A `BlockStore` that can do a part of a write before its bytes are there. Thread-safe."""

    def prepare(self, keys: Sequence[BlockKey]) -> Callable[[], None]:
        """These blocks are being computed, and are written soon, or never: what to do now that a write would wait for.

        Called on the forward thread before the step's first layer; what it returns, on a writer thread beside the
        others. Evicts nothing.
        """
        ...


@runtime_checkable
class EvictingStore(Protocol):
    """A `BlockStore` that makes room by itself, and can be kept from removing what a hand-off needs. Thread-safe."""

    def promise(self, keys: Sequence[BlockKey]) -> None:
        """Evict none of these, stored or not yet: rather fail to write others. Counts: each call wants a `release`."""
        ...

    def release(self, keys: Sequence[BlockKey]) -> None:
        """These may go, as far as this call's `promise` is concerned."""
        ...


@runtime_checkable
class ForgetfulStore(Protocol):
    """A `BlockStore` that loses blocks without a word: others fill it, and it keeps what it likes."""

    def count_missing(self, keys: Sequence[BlockKey]) -> int:
        """How many of these are not stored, for all that can be learned in a bounded time. Called on writer threads."""
        ...


class BlockDraft(Protocol):
    """A block that is written while it is still being computed; nobody finds it before it is published.

    Used by one thread at a time. Failures are no news: a draft that failed is not published, and its block is written
    like any other.
    """

    def append(self, piece: memoryview) -> None:
        """Write the next piece of the payload; the buffer may be reused when this returns."""
        ...

    def publish(self) -> bool:
        """Make the block, whose payload is whole, a stored one; whether that worked. The draft is over."""
        ...

    def abandon(self) -> None:
        """Remove it; idempotent."""
        ...


@runtime_checkable
class DraftingStore(Protocol):
    """A `BlockStore` that also takes blocks piece by piece."""

    def begin_draft(self, key: BlockKey) -> BlockDraft:
        """Begin to write a block. Called on writer threads."""
        ...
