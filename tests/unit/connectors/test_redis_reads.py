"""Values in pieces: what is asked for, over which lanes, and what becomes of what comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from pdserve.connectors.blocks.block_format import HEADER_BYTES, BlockFormat
from pdserve.connectors.blocks.failures import Failure, InvalidBlockError
from pdserve.connectors.blocks.messages import BlockTransfer
from pdserve.connectors.redis.channel import Command
from pdserve.connectors.redis.keys import KeyNames
from pdserve.connectors.redis.reads import ValueReader
from pdserve.connectors.testing import build_context
from pdserve.kv_layout import BlockKey, KVCacheSpec, Rank
from pdserve.protocol import Role

LARGE = KVCacheSpec(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
IDENTITY = build_context(Role.DECODE, {}, spec=LARGE).identity
FORMAT = BlockFormat(IDENTITY, LARGE)
NAMES = KeyNames("mine", IDENTITY, Rank())
BLOCKS = [BlockTransfer(bytes([number] * 16), 16, number) for number in range(5)]


class Server:
    """Answers from memory, over any number of lanes."""

    def __init__(self, values: dict[bytes, bytes]) -> None:
        self._values = values
        self.commands: list[Command] = []

    def ask(self, commands: Sequence[Command]) -> list[Reply]:
        self.commands += commands
        return [Reply(self._answer(command)) for command in commands]

    def _answer(self, command: Command) -> bytes | int:
        value = self._values.get(command.key, b"")
        if command.name == b"EXPIRE":
            return int(bool(value))
        start, last = map(int, command.arguments)
        return value[start : last + 1]


class Reply:
    def __init__(self, content: bytes | int) -> None:
        self._content = content
        self._start = 0

    def read_number(self) -> int:
        assert isinstance(self._content, int)
        return self._content

    def read_value_length(self) -> int:
        assert isinstance(self._content, bytes)
        return len(self._content)

    def read_into(self, target: memoryview) -> None:
        assert isinstance(self._content, bytes)
        target[:] = self._content[self._start : self._start + len(target)]
        self._start += len(target)

    def end_value(self) -> None:
        assert isinstance(self._content, bytes)
        assert self._start == len(self._content)


def seal(key: BlockKey) -> bytes:
    value = bytearray(FORMAT.value_bytes)
    value[HEADER_BYTES:] = bytes(index % 251 for index in range(LARGE.block_bytes))
    FORMAT.seal(key, memoryview(value))
    return bytes(value)


def read(value: bytes | None, ttl: bytes | None = b"60") -> tuple[Failure | None, bytes]:
    block = BLOCKS[0]
    server = Server({} if value is None else {NAMES.of(block.digest): value})
    reader = ValueReader(NAMES, FORMAT, ttl)
    payload = bytearray(LARGE.block_bytes)
    (channels,) = reader.ask(server, [block], 0)
    return reader.read(channels, block.key, memoryview(payload)), bytes(payload)


@pytest.mark.parametrize("ttl", [None, b"60"])
def test_a_value_comes_whole(ttl: bytes | None) -> None:
    value = seal(BLOCKS[0].key)
    assert read(value, ttl) == (None, value[HEADER_BYTES:])


def test_neighbouring_pieces_come_over_different_lanes_and_prolong_a_life_once() -> None:
    server = Server({})
    reader = ValueReader(NAMES, FORMAT, b"60")
    reader.ask(server, BLOCKS[:2], 0)
    reader.ask(server, BLOCKS[2:], 2)
    pieces = [command for command in server.commands if command.name == b"GETRANGE"]
    assert [command.lane for command in pieces] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert [command.key for command in server.commands if command.name == b"EXPIRE"] == [
        NAMES.of(block.digest) for block in BLOCKS
    ]


@pytest.mark.parametrize("ttl", [None, b"60"])
def test_what_is_not_there_is_missing(ttl: bytes | None) -> None:
    failure, _ = read(None, ttl)
    assert failure is not None
    assert failure.kind == "missing"


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda value: value[:1], "truncated"),
        (lambda value: value[: HEADER_BYTES + 1], "truncated"),
        (lambda value: value[:-1], "truncated"),
        (lambda value: value + b"x", "corrupt"),
        (lambda value: value[:-1] + b"\xff", "corrupt"),
        (lambda value: seal(BLOCKS[1].key), "foreign"),
    ],
)
def test_any_other_value_is_invalid(change: Callable[[bytes], bytes], kind: str) -> None:
    with pytest.raises(InvalidBlockError) as caught:
        read(change(seal(BLOCKS[0].key)))
    assert caught.value.kind == kind


def test_a_value_that_goes_between_two_pieces_is_missing() -> None:
    """Evicted between two pieces: the second answer is empty."""
    block = BLOCKS[0]
    server = Server({NAMES.of(block.digest): seal(block.key)})
    reader = ValueReader(NAMES, FORMAT, None)
    (channels,) = reader.ask(server, [block], 0)
    channels[1] = Reply(b"")
    failure = reader.read(channels, block.key, memoryview(bytearray(LARGE.block_bytes)))
    assert failure is not None
    assert failure.kind == "missing"


def test_ranks_have_names_of_their_own() -> None:
    ranks = Rank(0, 2).all_ranks
    names = {KeyNames("mine", IDENTITY, rank).of(BLOCKS[0].digest) for rank in [Rank(), *ranks]}
    assert len(names) == 3
    assert all(name.endswith(BLOCKS[0].key.hex.encode()) for name in names)
