"""Lookups with a scripted server and a clock: who waits, for how long, and for whom the answer is good."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

import pytest

from pdserve.connectors.base import KVRequest
from pdserve.connectors.blocks.block_format import HEADER_BYTES
from pdserve.connectors.blocks.failures import Failure
from pdserve.connectors.redis.channel import Command
from pdserve.connectors.redis.index import RedisIndex
from pdserve.connectors.redis.options import parse_options
from pdserve.connectors.redis.server import ExchangeError
from pdserve.connectors.testing import build_context
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.kv_layout import BlockKey
from pdserve.protocol import Role

WHOLE = HEADER_BYTES + TINY_SPEC.block_bytes


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Reply:
    def __init__(self, value: int | Failure) -> None:
        self._value = value

    def read_number(self) -> int | Failure:
        return self._value


class ScriptedServer:
    """Answers when it is let go."""

    place = "scripted"

    def __init__(self) -> None:
        self.replies: list[int | Failure] = []
        self.failure: Failure | None = None
        self.gate = threading.Event()
        self.num_exchanges = 0
        self.num_moves = 0
        self.gate.set()

    @contextlib.contextmanager
    def exchange(self, commands: Sequence[Command]) -> Iterator[list[Reply]]:
        self.num_exchanges += 1
        assert self.gate.wait(10)
        if self.failure is not None:
            raise ExchangeError(self.failure)
        yield [Reply(value) for value, _ in zip(self.replies, commands, strict=True)]

    def note_move(self) -> None:
        self.num_moves += 1

    def close(self) -> None:
        pass


class World:
    def __init__(self) -> None:
        context = build_context(Role.DECODE, {})
        self.server = ScriptedServer()
        self.clock = Clock()
        self.index = RedisIndex(
            self.server, context, parse_options(build_context(Role.DECODE, {"lookup_timeout_s": 0.25})), self.clock
        )

    def request(self, name: str, num_blocks: int) -> KVRequest:
        return KVRequest(name, num_blocks * 4, tuple(BlockKey(bytes([i] * 16), 4) for i in range(num_blocks)))

    def wait_for(self, request: KVRequest, start: int = 0) -> int:
        """Ask until there is an answer, while the clock stands."""
        for _ in range(10_000):
            answer = self.index.count_stored_run(request, start)
            if answer is not None:
                return answer
            threading.Event().wait(0.001)
        raise AssertionError("no answer")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.delenv("PDSERVE_REDIS_PASSWORD", raising=False)
    world = World()
    yield world
    world.server.gate.set()
    world.index.close()


def test_one_question_answers_for_every_start(world: World) -> None:
    world.server.replies = [WHOLE, WHOLE, WHOLE - 1, WHOLE]
    request = world.request("r", 4)
    assert world.index.count_stored_run(request, 0) is None
    assert world.wait_for(request) == 2
    assert [world.index.count_stored_run(request, start) for start in (0, 1, 2, 3, 4, 9)] == [2, 1, 0, 1, 0, 0]
    assert world.server.num_exchanges == 1


def test_a_late_answer_is_none_until_the_deadline_then_nothing(world: World) -> None:
    world.server.gate.clear()
    request = world.request("r", 2)
    assert world.index.count_stored_run(request, 0) is None
    world.clock.now += 0.24
    assert world.index.count_stored_run(request, 0) is None
    world.clock.now += 0.01
    assert world.index.count_stored_run(request, 0) == 0


def test_an_old_answer_is_asked_for_anew(world: World) -> None:
    world.server.replies = [WHOLE]
    request = world.request("r", 1)
    assert world.wait_for(request) == 1
    world.server.replies = [0]
    world.clock.now += 2.2
    assert world.index.count_stored_run(request, 0) == 1
    world.clock.now += 0.1
    assert world.wait_for(request) == 0
    assert world.server.num_exchanges == 2


def test_what_is_forgotten_is_asked_for_anew(world: World) -> None:
    world.server.replies = [WHOLE]
    request = world.request("r", 1)
    assert world.wait_for(request) == 1
    world.index.forget("r")
    world.index.forget("unknown")
    assert world.index._lookups == {}
    assert world.wait_for(request) == 1
    assert world.server.num_exchanges == 2


def test_after_a_failure_nobody_waits_for_a_while(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.server.failure = Failure("timeout", "no answer")
    assert world.wait_for(world.request("a", 1)) == 0
    assert world.index.count_stored_run(world.request("b", 1), 0) == 0
    assert world.server.num_exchanges == 1
    assert [record.getMessage() for record in caplog.records] == [
        "scripted cannot be asked for KV: no answer; prompts are computed until it can"
    ]
    world.server.failure, world.server.replies = None, [WHOLE]
    world.clock.now += 0.25
    assert world.wait_for(world.request("c", 1)) == 1


def test_a_move_makes_the_server_look_again(world: World) -> None:
    world.server.replies = [WHOLE, Failure("moved", "MOVED 1 other:1")]
    assert world.wait_for(world.request("a", 2)) == 1
    assert world.server.num_moves == 1


def test_a_request_without_keys_asks_nobody(world: World) -> None:
    assert world.index.count_stored_run(world.request("a", 0), 0) == 0
    assert world.server.num_exchanges == 0
