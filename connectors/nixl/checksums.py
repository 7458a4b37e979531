"""Checksums of the blocks that this engine hands out, taken a slice at a time between other things.

Most blocks of a prompt that is computed in several steps are filled long before its end. Their checksums are taken
beside its later steps, so that a consumer finds the answer ready, and its read has the memory to itself::

    a later step of the prompt ── add ─────┐
    the prompt is computed ────── finish ──┴──> advance, again and again ──> the checksums of all its blocks
    it was preempted, or ended ── forget ──┘

Lives on the transfer thread: a thread of its own would have to be woken, and waited for, at each hand-off, which takes
longer than a short prompt's checksums do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdserve.connectors.nixl.pool_memory import CHECKSUM_DTYPE, PoolMemory

# A quarter of a millisecond: consumers' messages do not wait longer.
_SLICE_BYTES = 8 << 20


@dataclass(slots=True, eq=False)
class _Prompt:
    """The blocks of a prompt that are filled, as far as is known, and the checksums of the first of them."""

    block_ids: list[int] = field(default_factory=list)
    checksums: bytearray = field(default_factory=bytearray)
    take: Callable[[bytes], None] | None = None
    """Wants the checksums: the prompt is whole."""

    @property
    def missing(self) -> list[int]:
        """Blocks whose checksums are still to be taken."""
        return self.block_ids[len(self.checksums) // CHECKSUM_DTYPE.itemsize :]


class PromptChecksums:
    """See the module.

    Args:
        memory: the pool.
        count_seconds: told of the time that each slice took.
    """

    def __init__(self, memory: PoolMemory, count_seconds: Callable[[float], None]) -> None:
        self._memory = memory
        self._count_seconds = count_seconds
        self._blocks_in_slice = max(_SLICE_BYTES // memory.region.block_bytes, 1)
        self._growing: dict[str, _Prompt] = {}
        self._queue: deque[_Prompt] = deque()

    def __bool__(self) -> bool:
        """Whether `advance` has something to do."""
        return bool(self._queue)

    def add(self, request_id: str, first_block: int, block_ids: Sequence[int]) -> None:
        """Blocks of a prompt from ``first_block`` on are filled; those before them were told of earlier."""
        prompt = self._growing.setdefault(request_id, _Prompt())
        if first_block == len(prompt.block_ids):
            prompt.block_ids += block_ids
            self._put(prompt)

    def forget(self, request_id: str) -> None:
        """The request was preempted, or has ended: nobody will ask for its blocks."""
        prompt = self._growing.pop(request_id, None)
        if prompt is not None and prompt in self._queue:
            self._queue.remove(prompt)

    def finish(self, request_id: str, block_ids: Sequence[int], take: Callable[[bytes], None]) -> None:
        """All blocks of a prompt are filled: hand ``take`` their checksums as soon as they are known."""
        prompt = self._growing.pop(request_id, _Prompt())
        if prompt.block_ids != block_ids[: len(prompt.block_ids)]:
            prompt.checksums.clear()
        prompt.block_ids = list(block_ids)
        prompt.take = take
        self._put(prompt)

    def advance(self) -> None:
        """Take a slice, in the order in which blocks were filled."""
        if not self._queue:
            return
        prompt = self._queue.popleft()  # one whose memory cannot be read is not tried again and again
        began = time.perf_counter()
        prompt.checksums += self._memory.get_checksums(prompt.missing[: self._blocks_in_slice]).tobytes()
        self._count_seconds(time.perf_counter() - began)
        if prompt.missing:
            self._queue.appendleft(prompt)
        elif prompt.take is not None:
            prompt.take(bytes(prompt.checksums))

    def _put(self, prompt: _Prompt) -> None:
        if prompt not in self._queue:
            self._queue.append(prompt)
