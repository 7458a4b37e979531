"""Shared memory from the engine's process to its workers: one message at a time, written once, read by all.

Telling readers that there is something to read is the writer's business, and so is not to write before all have read:
the engine's steps do not overlap.
"""

from __future__ import annotations

import mmap
import os
import struct

from pdserve.engine.parallel.shared_memory import create_shared_memory
from pdserve.errors import EngineError

_HEADER = struct.Struct("<QQ")
"""Sequence number and length of the message behind it."""
_FIRST_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 1 << 30


class BroadcastBuffer:
    """The memory, as one process sees it.

    Args:
        fd: what `create` made, or a copy of it in another process; closed by `close`.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._memory = mmap.mmap(fd, os.fstat(fd).st_size)
        self._sequence = 0

    @classmethod
    def create(cls) -> BroadcastBuffer:
        """New memory.

        Raises:
            ConfigError: as `create_shared_memory`.
        """
        return cls(create_shared_memory("steps", _FIRST_BYTES))

    def write(self, message: bytes) -> int:
        """Put ``message`` in the place of the last one; its sequence number, from 1.

        Raises:
            EngineError: it is too large.
        """
        if len(message) > MAX_MESSAGE_BYTES:
            raise EngineError(f"a step's message has {len(message)} bytes; at most {MAX_MESSAGE_BYTES} go to workers")
        needed = _HEADER.size + len(message)
        if needed > len(self._memory):
            os.ftruncate(self.fd, 2 * needed)
            self._map_again()
        self._sequence += 1
        self._memory[_HEADER.size : needed] = message
        _HEADER.pack_into(self._memory, 0, self._sequence, len(message))
        return self._sequence

    def read(self, sequence: int) -> bytes:
        """The message of this number.

        Raises:
            EngineError: another one is there.
        """
        found, length = _HEADER.unpack_from(self._memory)
        if found != sequence:
            raise EngineError(f"message {sequence} was announced, message {found} is there")
        if _HEADER.size + length > len(self._memory):
            self._map_again()
        return self._memory[_HEADER.size : _HEADER.size + length]

    def close(self) -> None:
        """Let go of the memory; idempotent."""
        if not self._memory.closed:
            self._memory.close()
            os.close(self.fd)

    def _map_again(self) -> None:
        """See all of the memory, which has grown."""
        self._memory.close()
        self._memory = mmap.mmap(self.fd, os.fstat(self.fd).st_size)
