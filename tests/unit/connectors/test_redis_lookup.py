"""What a server's replies say about a prompt."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import pytest

from pdserve.connectors.blocks.asked_index import UnansweredError
from pdserve.connectors.blocks.block_format import HEADER_BYTES
from pdserve.connectors.blocks.failures import Failure
from pdserve.connectors.redis.channel import Command
from pdserve.connectors.redis.lookup import RedisLookup
from pdserve.connectors.redis.options import parse_options
from pdserve.connectors.redis.server import ExchangeError
from pdserve.connectors.testing import build_context
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.kv_layout import BlockKey, Rank
from pdserve.protocol import Role

WHOLE = HEADER_BYTES + TINY_SPEC.block_bytes
KEYS = [BlockKey(bytes([number] * 16), 4) for number in range(4)]


class Reply:
    def __init__(self, value: int | Failure) -> None:
        self._value = value

    def read_number(self) -> int | Failure:
        return self._value


class ScriptedServer:
    place = "scripted"

    def __init__(self, replies: list[int | Failure] | Failure) -> None:
        self._replies = replies
        self.commands: list[Command] = []
        self.num_moves = 0

    @contextlib.contextmanager
    def exchange(self) -> Iterator[ScriptedServer]:
        if isinstance(self._replies, Failure):
            raise ExchangeError(self._replies)
        yield self

    def ask(self, commands: Sequence[Command]) -> list[Reply]:
        self.commands += commands
        return [Reply(value) for value in self._replies]

    def note_move(self) -> None:
        self.num_moves += 1


def build(server: ScriptedServer) -> RedisLookup:
    context = build_context(Role.DECODE, {"prefix": "mine"})
    return RedisLookup(server, context, parse_options(context))


@pytest.mark.parametrize(
    ("replies", "run"),
    [
        ([WHOLE] * 4, 4),
        ([WHOLE, WHOLE, 0, WHOLE], 2),
        ([WHOLE, WHOLE - 1, WHOLE, WHOLE], 1),
        ([WHOLE, WHOLE + 1, WHOLE, WHOLE], 1),
        ([Failure("io", "WRONGTYPE"), WHOLE, WHOLE, WHOLE], 0),
        ([0, Failure("moved", "MOVED 1 other:1"), WHOLE, WHOLE], 0),  # behind the gap it does not matter
    ],
)
def test_whole_values_count_up_to_the_first_gap(replies: list[int | Failure], run: int) -> None:
    server = ScriptedServer(replies)
    lookup = build(server)
    assert lookup.count_stored_run(KEYS) == run
    assert {command.name for command in server.commands} == {b"STRLEN"}
    assert all(command.key.startswith(b"mine:kv:") for command in server.commands)
    assert [command.key[-32:] for command in server.commands] == [key.hex.encode() for key in KEYS]


def test_a_move_makes_the_server_look_again() -> None:
    server = ScriptedServer([WHOLE, Failure("moved", "MOVED 1 other:1"), WHOLE, WHOLE])
    with pytest.raises(UnansweredError, match="MOVED"):
        build(server).count_stored_run(KEYS)
    assert server.num_moves == 1


def test_a_failure_keeps_its_kind() -> None:
    with pytest.raises(UnansweredError, match="no answer") as caught:
        build(ScriptedServer(Failure("timeout", "no answer"))).count_stored_run(KEYS)
    assert caught.value.failure.kind == "timeout"


def test_a_block_is_stored_when_all_ranks_have_their_shares() -> None:
    context = dataclasses.replace(build_context(Role.DECODE, {}), rank=Rank(0, 2))
    # Of each block this rank's share, whose size is known, and the other's.
    server = ScriptedServer([WHOLE, 7, WHOLE, WHOLE, WHOLE, 0, WHOLE, WHOLE])
    assert RedisLookup(server, context, parse_options(context)).count_stored_run(KEYS) == 2
    assert len({command.key for command in server.commands}) == 8
    assert all(b":tp0of2-pp0of1:" in command.key for command in server.commands[::2])
    assert all(b":tp1of2-pp0of1:" in command.key for command in server.commands[1::2])
