"""The order in which blocks are read: one load after the other, a piece at a time.

A piece is small enough for its bytes to be in the processor's cache still when their checksums are computed, right
after the read. Lives on the transfer thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from pdserve.connectors.nixl.agent import RemotePool, TransferAgent
from pdserve.connectors.nixl.loads import ActiveLoad
from pdserve.connectors.nixl.pool_memory import PoolMemory

_PIECE_BYTES = 2 << 20


class ReadQueue:
    """Loads whose blocks are to be read; the first one is being read.

    Args:
        agent: reads.
        memory: the pool.
        block_size: S.
        timeout_s: a piece that takes longer makes its load late.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        agent: TransferAgent,
        memory: PoolMemory,
        block_size: int,
        *,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._agent = agent
        self._memory = memory
        self._block_size = block_size
        self._blocks_in_piece = max(_PIECE_BYTES // memory.region.block_bytes, 1)
        self._timeout_s = timeout_s
        self._clock = clock
        self._queue: deque[tuple[ActiveLoad, RemotePool]] = deque()
        self._read: Any = None
        self._piece: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._queue)

    @property
    def first(self) -> ActiveLoad:
        """The load whose turn it is."""
        return self._queue[0][0]

    @property
    def is_in_background(self) -> bool:
        """Whether a piece is on its way now."""
        return self._read is not None

    def add(self, active: ActiveLoad, remote: RemotePool) -> None:
        """Read this load's blocks after those of the others. It cannot be late until it is its turn."""
        active.deadline = float("inf")
        self._queue.append((active, remote))

    def is_writing_to(self, active: ActiveLoad) -> bool:
        """Whether a piece of this load is on its way now."""
        return self._read is not None and self._queue[0][0] is active

    def remove(self, active: ActiveLoad) -> None:
        """Forget a load; a piece of it that is on its way is given up."""
        if self.is_writing_to(active):
            self._agent.release(self._read)
            self._read = None
        self._queue = deque(entry for entry in self._queue if entry[0] is not active)

    def advance(self) -> bool:
        """Start the first load's next piece, or look after the one that is on its way; whether it has arrived.

        Raises:
            TransportError: the first load's producer is gone, or does not have such blocks.
        """
        active, remote = self._queue[0]
        if self._read is None:
            start = active.num_started
            end = min(start + self._blocks_in_piece, active.num_blocks)
            active.num_started = end
            active.deadline = self._clock() + self._timeout_s
            self._piece = active.load.block_ids[start:end]
            self._read = self._agent.start_read(self._piece, remote, active.remote_block_ids[start:end])
        else:
            read, self._read = self._read, None
            if not self._agent.poll(read):
                self._read = read
        if self._read is not None:
            return False
        self._take_piece(active)
        return True

    def _take_piece(self, active: ActiveLoad) -> None:
        load = active.load
        num_tokens_in_last = load.num_prompt_tokens % self._block_size
        has_prompts_end = load.first_block + active.num_blocks == len(load.reference.block_ids)
        if active.is_read and has_prompts_end and num_tokens_in_last:
            self._memory.clear_behind(load.block_ids[-1], num_tokens_in_last)
        active.found += self._memory.get_checksums(self._piece).tobytes()
