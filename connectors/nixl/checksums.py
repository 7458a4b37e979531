"""Checksums of the blocks that this engine hands out, taken on a thread of their own.

Most blocks of a prompt that is computed in several steps are filled long before its end. Their checksums are taken
beside its later steps, so that a consumer finds the answer ready, and its read has the memory to itself::

    a later step of the prompt ── add ─────┐
    the prompt is computed ────── finish ──┴──> checksum thread ──> the checksums of all its blocks
    it was preempted, or ended ── forget ──┘
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdserve.connectors.blocks.task_threads import TaskThreads
from pdserve.connectors.nixl.pool_memory import PoolMemory


@dataclass(slots=True)
class _Filled:
    """The first blocks of a prompt, and their checksums, one after the other."""

    block_ids: list[int] = field(default_factory=list)
    checksums: bytearray = field(default_factory=bytearray)


class PromptChecksums:
    """Called from the transfer thread; what it keeps lives on the checksum thread.

    Args:
        memory: the pool.
        count_seconds: told of the time that each round took.
    """

    def __init__(self, memory: PoolMemory, count_seconds: Callable[[float], None]) -> None:
        self._memory = memory
        self._count_seconds = count_seconds
        self._threads = TaskThreads("kv-checksum", 1)
        self._filled: dict[str, _Filled] = {}

    def add(self, request_id: str, first_block: int, block_ids: Sequence[int]) -> None:
        """Blocks of a prompt from ``first_block`` on are filled; those before them were told of earlier."""
        self._threads.submit(functools.partial(self._add, request_id, first_block, block_ids))

    def forget(self, request_id: str) -> None:
        """The request was preempted, or has ended: nobody will ask for its blocks."""
        self._threads.submit(functools.partial(self._forget, request_id))

    def finish(self, request_id: str, block_ids: Sequence[int], take: Callable[[bytes], None]) -> None:
        """All blocks of a prompt are filled: hand ``take`` their checksums, on the checksum thread."""
        self._threads.submit(functools.partial(self._finish, request_id, block_ids, take))

    def close(self, timeout_s: float) -> None:
        """Stop the thread."""
        self._threads.close(timeout_s)

    def _add(self, request_id: str, first_block: int, block_ids: Sequence[int]) -> None:
        filled = self._filled.setdefault(request_id, _Filled())
        if first_block == len(filled.block_ids):
            filled.block_ids += block_ids
            filled.checksums += self._compute(block_ids)

    def _forget(self, request_id: str) -> None:
        self._filled.pop(request_id, None)

    def _finish(self, request_id: str, block_ids: Sequence[int], take: Callable[[bytes], None]) -> None:
        filled = self._filled.pop(request_id, _Filled())
        num_filled = len(filled.block_ids)
        if filled.block_ids != block_ids[:num_filled]:
            filled, num_filled = _Filled(), 0
        take(bytes(filled.checksums) + self._compute(block_ids[num_filled:]))

    def _compute(self, block_ids: Sequence[int]) -> bytes:
        began = time.perf_counter()
        checksums = self._memory.get_checksums(block_ids).tobytes()
        self._count_seconds(time.perf_counter() - began)
        return checksums
