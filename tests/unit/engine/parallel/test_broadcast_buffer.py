"""The memory between an engine and its workers, with both ends in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from pdserve.engine.parallel.broadcast_buffer import BroadcastBuffer
from pdserve.errors import EngineError


@pytest.fixture
def writer() -> Iterator[BroadcastBuffer]:
    buffer = BroadcastBuffer.create()
    yield buffer
    buffer.close()


@pytest.fixture
def readers(writer: BroadcastBuffer) -> Iterator[list[BroadcastBuffer]]:
    buffers = [BroadcastBuffer(os.dup(writer.fd)) for _ in range(2)]
    yield buffers
    for buffer in buffers:
        buffer.close()


def test_all_readers_read_each_message(writer: BroadcastBuffer, readers: list[BroadcastBuffer]) -> None:
    for message in (b"first", b"", b"a longer one"):
        sequence = writer.write(message)
        assert [reader.read(sequence) for reader in readers] == [message, message]


def test_memory_grows_with_its_messages(writer: BroadcastBuffer, readers: list[BroadcastBuffer]) -> None:
    for size in (1 << 20, 5 << 20, 3, 30 << 20):
        message = bytes([size % 251]) * size
        sequence = writer.write(message)
        assert all(reader.read(sequence) == message for reader in readers)


def test_a_reader_that_missed_a_message_says_so(writer: BroadcastBuffer, readers: list[BroadcastBuffer]) -> None:
    missed = writer.write(b"one")
    writer.write(b"two")
    with pytest.raises(EngineError, match="message 1 was announced, message 2 is there"):
        readers[0].read(missed)


def test_it_has_no_name_and_closes_twice(writer: BroadcastBuffer) -> None:
    assert os.fstat(writer.fd).st_nlink == 0
    writer.close()
    writer.close()
