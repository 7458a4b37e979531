"""One load under way: what it wants, how far it is, and what its end means. No sockets, no NIXL."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from pdserve.connectors.blocks.failures import Failure
from pdserve.connectors.nixl.messages import Load
from pdserve.connectors.nixl.pool_memory import CHECKSUM_DTYPE, Checksums


class Phase(enum.Enum):
    """What a load waits for."""

    CONNECTING = enum.auto()
    """The producer's answer to Hello."""
    READING = enum.auto()
    """Its turn, or the end of a read."""
    CLOSING = enum.auto()
    """The producer's word that the lease held, and its checksums."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a load ends before it is whole.

    Attributes:
        failure: what went wrong; None when nobody wants the blocks any more.
        tells_producer: the producer does not know yet.
    """

    failure: Failure | None
    tells_producer: bool


@dataclass(slots=True, eq=False)
class ActiveLoad:
    """State of a load.

    Attributes:
        load: what was asked for.
        began_at: monotonic seconds.
        deadline: when what it waits for is late; moves with each step forward.
        extend_at: when the producer needs the next sign of life.
        phase: what it waits for.
        num_started: blocks whose read has begun; what they hold is not to be believed before the end.
        checksums: of the blocks as they arrived, in parts, which may still be under way.
        ending: set when it is to end as soon as nothing is written to its blocks any more.
    """

    load: Load
    began_at: float
    deadline: float
    extend_at: float = float("inf")
    phase: Phase = Phase.CONNECTING
    num_started: int = 0
    checksums: list[Future[Checksums]] = field(default_factory=list)
    ending: Ending | None = None

    @property
    def transfer_id(self) -> str:
        """Name of the transfer."""
        return self.load.reference.transfer_id

    @property
    def num_blocks(self) -> int:
        """Blocks to load."""
        return len(self.load.block_ids)

    @property
    def is_read(self) -> bool:
        """Whether all blocks have been asked for."""
        return self.num_started == self.num_blocks

    @property
    def remote_block_ids(self) -> Sequence[int]:
        """Where the blocks lie at the producer, in order."""
        load = self.load
        return load.reference.block_ids[load.first_block : load.first_block + self.num_blocks]

    def fits(self, num_blocks_here: int, num_blocks_there: int) -> bool:
        """Whether all the blocks exist, here and at the producer."""
        there = self.remote_block_ids
        return (
            len(there) == self.num_blocks
            and all(0 <= block_id < num_blocks_there for block_id in there)
            and all(0 <= block_id < num_blocks_here for block_id in self.load.block_ids)
        )

    def find_bad_blocks(self, checksums: bytes) -> list[int]:
        """Indices of the loaded blocks that are not what the producer holds; waits for the last checksums.

        Args:
            checksums: the producer's, of all the prompt's blocks.
        """
        load = self.load
        expected = np.frombuffer(checksums[: len(checksums) // 8 * 8], dtype=CHECKSUM_DTYPE)
        expected = expected[load.first_block : load.first_block + self.num_blocks]
        found = np.concatenate([part.result() for part in self.checksums])
        if expected.shape != found.shape:
            return list(range(self.num_blocks))
        return [int(index) for index in np.flatnonzero(found != expected)]
