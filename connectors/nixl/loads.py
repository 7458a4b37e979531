"""One load under way: what it wants, how far it is, and what its end means. No sockets, no NIXL."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pdserve.connectors.nixl.messages import Load
from pdserve.connectors.nixl.pool_memory import CHECKSUM_DTYPE, Checksums


class Phase(enum.Enum):
    """What a load waits for."""

    CONNECTING = enum.auto()
    """The producer's answer to Hello."""
    OPENING = enum.auto()
    """The producer's answer to Open."""
    READING = enum.auto()
    """Its turn, or the end of a read."""
    CLOSING = enum.auto()
    """The producer's word that the lease held, and its checksums."""


@dataclass(slots=True, eq=False)
class ActiveLoad:
    """State of a load.

    Attributes:
        load: what was asked for.
        began_at: monotonic seconds.
        deadline: when what it waits for is late; moves with each step forward.
        extend_at: when the producer needs the next sign of life; meaningful once opened.
        extend_interval_s: from one sign of life to the next.
        phase: what it waits for.
        remote_block_ids: where the blocks lie at the producer, in order; known once opened.
        num_started: blocks whose read has begun; what they hold is not to be believed before the end.
        checksums: of the blocks as they arrived, in parts.
        is_cancelled: the request has ended; the load ends when it can.
    """

    load: Load
    began_at: float
    deadline: float
    extend_at: float = 0.0
    extend_interval_s: float = 0.0
    phase: Phase = Phase.CONNECTING
    remote_block_ids: Sequence[int] = ()
    num_started: int = 0
    checksums: list[Checksums] = field(default_factory=list)
    is_cancelled: bool = False

    @property
    def transfer_id(self) -> str:
        """Name of the transfer."""
        return self.load.reference.transfer_id

    @property
    def is_opened(self) -> bool:
        """Whether the producer counts on a sign of life, and on an end."""
        return self.phase in (Phase.READING, Phase.CLOSING)

    @property
    def num_blocks(self) -> int:
        """Blocks to load."""
        return len(self.load.block_ids)

    def take_opened(self, block_ids: Sequence[int], num_blocks_there: int) -> bool:
        """The producer told where the prompt's blocks lie; whether that makes sense."""
        load = self.load
        mine = block_ids[load.first_block : load.first_block + self.num_blocks]
        if len(block_ids) != load.num_prompt_blocks or len(mine) != self.num_blocks:
            return False
        if not all(0 <= block_id < num_blocks_there for block_id in mine):
            return False
        self.remote_block_ids = mine
        return True

    def find_bad_blocks(self, checksums: bytes) -> list[int]:
        """Indices of the loaded blocks that are not what the producer holds.

        Args:
            checksums: the producer's, of all the prompt's blocks.
        """
        load = self.load
        expected = np.frombuffer(checksums[: len(checksums) // 8 * 8], dtype=CHECKSUM_DTYPE)
        expected = expected[load.first_block : load.first_block + self.num_blocks]
        if len(expected) != self.num_blocks:
            return list(range(self.num_blocks))
        found = np.concatenate(self.checksums)
        return [int(index) for index in np.flatnonzero(found != expected)]

    def count_good_tokens(self, num_good_blocks: int, block_size: int) -> int:
        """Tokens, from the load's start, in the first ``num_good_blocks`` blocks."""
        return min(num_good_blocks * block_size, self.load.num_tokens)
