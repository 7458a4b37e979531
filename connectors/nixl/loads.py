"""One load under way: what it wants, how far it is, and what its end means. No sockets, no NIXL."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pdserve.connectors.blocks.failures import Failure
from pdserve.connectors.nixl.messages import Load
from pdserve.connectors.nixl.pool_memory import CHECKSUM_DTYPE


class Phase(enum.Enum):
    """What a load waits for."""

    CONNECTING = enum.auto()
    """The producer's answer to Hello."""
    READING = enum.auto()
    """Its turn, or the end of a read."""
    CONFIRMING = enum.auto()
    """The producer's word that the lease holds, and its checksums; everything is read."""


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
        phase: what it waits for.
        num_asked: questions to the producer for the lease.
        asked_at: when it was asked last; None when no question is open.
        ask_at: when it is to be asked again.
        held_until: the lease holds at least so long.
        read_at: when the last byte had come.
        expected: the producer's checksums of all the prompt's blocks.
        num_started: blocks whose read has begun; what they hold is not to be believed before the end.
        found: checksums of the blocks as they arrived, as many as have.
        ending: set when it is to end as soon as nothing is written to its blocks any more.
    """

    load: Load
    began_at: float
    deadline: float
    phase: Phase = Phase.CONNECTING
    num_asked: int = 0
    asked_at: float | None = None
    ask_at: float = math.inf
    held_until: float = -math.inf
    read_at: float = math.inf
    expected: bytes = b""
    num_started: int = 0
    found: bytearray = field(default_factory=bytearray)
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

    @property
    def was_held(self) -> bool:
        """Whether the lease certainly held until the last byte had come."""
        return self.held_until > self.read_at

    def ask(self, now: float) -> int:
        """The producer is being asked for the lease; the question's serial number."""
        self.asked_at, self.ask_at = now, math.inf
        self.num_asked += 1
        return self.num_asked - 1

    def take_answer(self, serial: int, lease_s: float, checksums: bytes) -> bool:
        """The producer has granted the lease; False when that answers no open question.

        The lease counts from the question: the producer's began later, and its clock runs as fast as this one.
        """
        if self.asked_at is None or serial != self.num_asked - 1:
            return False
        self.held_until = self.asked_at + lease_s
        self.ask_at = self.asked_at + self.load.reference.extension_interval_s
        self.asked_at = None
        self.expected = checksums
        return True

    def find_bad_blocks(self) -> list[int]:
        """Indices of the loaded blocks that are not what the producer holds."""
        size, first = CHECKSUM_DTYPE.itemsize, self.load.first_block
        expected = self.expected[first * size : (first + self.num_blocks) * size]
        if expected == self.found:
            return []
        if len(expected) != len(self.found):
            return list(range(self.num_blocks))
        differs = np.frombuffer(expected, CHECKSUM_DTYPE) != np.frombuffer(self.found, CHECKSUM_DTYPE)
        return [int(index) for index in np.flatnonzero(differs)]
