"""What the store asks the server, when, and when not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch

from pdserve.connectors.blocks.block_format import BlockFormat
from pdserve.connectors.blocks.block_memory import BlockMemory
from pdserve.connectors.blocks.failures import Failure
from pdserve.connectors.blocks.messages import BlockTransfer
from pdserve.connectors.blocks.store import SealedBlock, WriteResult
from pdserve.connectors.redis import redis_store
from pdserve.connectors.redis.channel import Command
from pdserve.connectors.redis.options import parse_options
from pdserve.connectors.redis.redis_store import RedisStore
from pdserve.connectors.redis.server import ExchangeError
from pdserve.connectors.testing import build_context
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.kv_layout import BlockKey
from pdserve.protocol import Role

CONTEXT = build_context(Role.PREFILL, {})
KEYS = [BlockKey(bytes([number] * 16), TINY_SPEC.block_size) for number in range(4)]
FORMAT = BlockFormat(CONTEXT.identity, TINY_SPEC)


class Server:
    """Answers from memory, and notes what it was asked."""

    place = "scripted"

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.num_exchanges = 0
        self.values: dict[bytes, bytes] = {}
        self.asked: list[tuple[bytes, bytes]] = []

    @contextlib.contextmanager
    def exchange(self) -> Iterator[Server]:
        self.num_exchanges += 1
        if self.failure is not None:
            raise ExchangeError(self.failure)
        yield self

    def ask(self, commands: Sequence[Command]) -> list[Reply]:
        self.asked += [(command.name, command.key[-32:]) for command in commands]
        return [Reply(self._answer(command)) for command in commands]

    def _answer(self, command: Command) -> int:
        if command.name == b"SET":
            self.values[command.key] = bytes(command.arguments[0])
        return len(self.values.get(command.key, b"")) if command.name == b"STRLEN" else int(command.key in self.values)


class Reply:
    def __init__(self, number: int) -> None:
        self._number = number

    def read_number(self) -> int:
        return self._number

    def read_ok(self) -> None:
        return None


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def store(server: Server) -> RedisStore:
    return RedisStore(server, CONTEXT, parse_options(CONTEXT))


def names(*numbers: int) -> list[bytes]:
    return [KEYS[number].hex.encode() for number in numbers]


def write(store: RedisStore, *numbers: int) -> list[WriteResult]:
    blocks = [SealedBlock(KEYS[number], memoryview(bytearray(FORMAT.value_bytes))) for number in numbers]
    return store.write(blocks)


def test_what_was_asked_when_the_step_began_is_not_asked_again(store: RedisStore, server: Server) -> None:
    write(store, 0, 1)
    ask = store.prepare(KEYS[:3])
    assert [store.has(key) for key in KEYS] == [False] * 4  # not known before it is asked
    ask()
    assert [store.has(key) for key in KEYS] == [True, True, False, False]
    server.asked.clear()
    assert write(store, 1, 2) == [WriteResult(was_there=True), WriteResult()]
    assert server.asked == [(b"SET", *names(2))]
    server.asked.clear()
    assert write(store, 2, 3) == [WriteResult(), WriteResult()]
    assert server.asked == [(b"STRLEN", *names(3)), (b"EXPIRE", *names(3)), (b"SET", *names(2)), (b"SET", *names(3))]


def test_an_answer_is_good_for_one_step(store: RedisStore, server: Server) -> None:
    """Also one that comes late: what is evicted meanwhile is written again."""
    write(store, 0)
    ask_late = store.prepare(KEYS[:1])
    store.prepare(KEYS[:1])
    ask_late()
    server.values.clear()
    assert not store.has(KEYS[0])
    assert write(store, 0) == [WriteResult()]
    assert len(server.values) == 1


def test_a_question_that_fails_is_asked_by_the_write(store: RedisStore, server: Server) -> None:
    server.failure = Failure("timeout", "asleep")
    store.prepare(KEYS[:1])()
    assert not store.has(KEYS[0])
    assert write(store, 0) == [WriteResult(server.failure)]
    server.failure = None
    assert write(store, 0) == [WriteResult()]


def test_after_a_timeout_loads_that_wait_do_not_wait_for_the_server(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(redis_store, "time", SimpleNamespace(monotonic=lambda: clock.now))
    store = RedisStore(server, CONTEXT, parse_options(CONTEXT))
    blocks = [BlockTransfer(key.digest, key.num_tokens, number) for number, key in enumerate(KEYS)]
    kv_cache = torch.zeros((len(KEYS), *TINY_SPEC.block_shape), dtype=getattr(torch, TINY_SPEC.dtype))
    memory = BlockMemory(kv_cache, TINY_SPEC, "scripted")
    server.failure = Failure("timeout", "asleep")
    assert next(store.read(blocks, memory)) == server.failure
    for _ in range(3):
        assert next(store.read(blocks, memory)) == Failure("timeout", "the server has just kept another load waiting")
    assert server.num_exchanges == 1
    clock.now += 0.3
    server.failure = Failure("unreachable", "gone")  # which is told at once
    for _ in range(2):
        assert next(store.read(blocks, memory)) == server.failure
    assert server.num_exchanges == 3
