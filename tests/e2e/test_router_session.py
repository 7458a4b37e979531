"""One session between a router and an instance, over a real connection whose other end is played by hand."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from pdserve.peers.curve import Curve, read_curve
from pdserve.peers.curve_keys import make_key_pair
from pdserve.peers.gate import Gate
from pdserve.protocol import (
    AbortRequests,
    AddRequest,
    CacheEvents,
    FinishReason,
    Goodbye,
    Heartbeat,
    Hello,
    InstanceLoad,
    Ready,
    Refused,
    RequestOutput,
    Role,
    SamplingParams,
    StepOutputs,
    decode_router_message,
    encode,
)
from pdserve.router.instance import Instance, SessionSettings
from pdserve.router.leg import InstanceLostError

sys.path.insert(0, str(Path(__file__).parent.parent))

from replay_instance import ReplayInstance, ReplayOptions


class Watcher:
    """Counts what the instance tells."""

    def __init__(self) -> None:
        self.num_ready = self.num_lost = self.num_wire_errors = 0

    def instance_ready(self, instance: Instance) -> None:
        self.num_ready += 1

    def instance_lost(self, instance: Instance) -> None:
        self.num_lost += 1

    def instance_load_changed(self, instance: Instance) -> None:
        pass

    def instance_cache_changed(self, instance: Instance, events: CacheEvents) -> None:
        pass

    def wire_error(self, instance: Instance) -> None:
        self.num_wire_errors += 1


class Other:
    """The instance's end."""

    def __init__(self, context: zmq.asyncio.Context, curve: Curve | None = None) -> None:
        self.context = context
        self.gate = None if curve is None else Gate(context, allowed_peers=None, curve=curve)
        self.peer = b""
        self.session = ""
        self.open("tcp://127.0.0.1:*")
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def open(self, endpoint: str) -> None:
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if self.gate is not None:
            self.gate.guard(self.socket)
        self.socket.bind(endpoint)

    async def receive(self, kind: type[Any]) -> Any:
        while True:
            self.peer, frame = await self.socket.recv_multipart()
            message = decode_router_message(frame)
            if isinstance(message, kind):
                return message

    async def send(self, message: Any) -> None:
        await self.socket.send_multipart([self.peer, message if isinstance(message, bytes) else encode(message)])

    async def accept(self, generation: str = "g0", **fields: Any) -> None:
        self.session = (await self.receive(Hello)).session
        ready = build_ready(self.session)
        await self.send(msgspec.structs.replace(ready, generation=generation, **fields))


def build_ready(session: str) -> Ready:
    replay = ReplayInstance.__new__(ReplayInstance)
    replay.options, replay.generation, replay.port, replay.live = ReplayOptions(), "g0", 1, {}
    return replay.ready(session)


def with_session(
    test: Callable[[Instance, Other, Watcher], Awaitable[None]],
    timeout_s: float = 30.0,
    *,
    own: Curve | None = None,
    theirs: Curve | None = None,
) -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            context = zmq.asyncio.Context()
            other, watcher = Other(context, theirs), Watcher()
            instance = Instance(
                other.endpoint,
                Role.DECODE,
                router_id="r",
                context=context,
                observer=watcher,
                settings=SessionSettings(heartbeat_interval_s=0.05, heartbeat_timeout_s=timeout_s, curve=own),
            )
            running = asyncio.create_task(instance.run())
            try:
                await test(instance, other, watcher)
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                other.socket.close()
                await asyncio.to_thread(context.term)

    asyncio.run(main())


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def add_request(request_id: str) -> AddRequest:
    return AddRequest(request_id=request_id, prompt_token_ids=[1], sampling=SamplingParams())


def step(*outputs: RequestOutput, **load: Any) -> StepOutputs:
    return StepOutputs(outputs=list(outputs), load=InstanceLoad(**load))


def test_legs_get_their_outputs_and_nothing_else_does() -> None:
    async def test(instance: Instance, other: Other, watcher: Watcher) -> None:
        await other.accept()
        await until(lambda: instance.is_usable)
        first, second = instance.start_leg(add_request("a")), instance.start_leg(add_request("b"))
        assert [(await other.receive(AddRequest)).request_id for _ in range(2)] == ["a", "b"]
        assert (instance.num_legs, instance.num_unreported) == (2, 2)
        await other.send(
            step(
                RequestOutput(request_id="a", new_token_ids=[5]),
                RequestOutput(request_id="unknown", new_token_ids=[9]),
                RequestOutput(request_id="b", new_token_ids=[6], finish_reason=FinishReason.LENGTH),
                RequestOutput(request_id="b", new_token_ids=[7]),
                num_running=1,
            )
        )
        assert (await first.next_output()).new_token_ids == [5]
        assert (await second.next_output()).new_token_ids == [6]
        assert (instance.num_legs, instance.num_unreported, instance.load.num_running) == (1, 0, 1)
        second.close()
        first.close()
        first.close()
        assert (await other.receive(AbortRequests)).request_ids == ["a"]
        assert instance.num_legs == 0

    with_session(test)


def test_frames_that_are_no_messages_are_counted_and_the_session_lives() -> None:
    async def test(instance: Instance, other: Other, watcher: Watcher) -> None:
        await other.accept()
        for frame in (b"", b"\xc1", b"\x93\x01\x02\x03", encode(Goodbye()), b"x" * 100_000):
            await other.send(frame)
        await other.send(Heartbeat(generation="g0", load=InstanceLoad(num_waiting=3)))
        await until(lambda: instance.load.num_waiting == 3)
        assert watcher.num_wire_errors == 5
        assert (watcher.num_ready, watcher.num_lost) == (1, 0)

    with_session(test)


def test_broken_connection_loses_the_legs_and_a_new_session_follows() -> None:
    async def test(instance: Instance, other: Other, watcher: Watcher) -> None:
        await other.accept()
        await until(lambda: instance.is_usable)
        former, leg = other.session, instance.start_leg(add_request("a"))
        other.socket.close()
        try:
            await leg.next_output()
            raise AssertionError
        except InstanceLostError:
            pass
        assert not instance.is_usable
        assert watcher.num_lost == 1
        try:
            instance.start_leg(add_request("b"))
            raise AssertionError
        except InstanceLostError:
            pass
        other.open(other.endpoint)
        await other.accept("g1")
        await until(lambda: instance.is_usable)
        assert other.session != former
        leg.close()
        await other.send(Heartbeat(generation="g1", load=InstanceLoad()))
        await other.receive(Hello)

    with_session(test)


def test_new_generation_in_a_heartbeat_ends_the_session() -> None:
    async def test(instance: Instance, other: Other, watcher: Watcher) -> None:
        await other.accept("g0")
        await until(lambda: instance.is_usable)
        await other.send(Heartbeat(generation="g1", load=InstanceLoad()))
        await until(lambda: watcher.num_lost == 1)
        await other.accept("g1")
        await until(lambda: watcher.num_ready == 2)

    with_session(test)


def test_silence_ends_the_session() -> None:
    async def test(instance: Instance, other: Other, watcher: Watcher) -> None:
        await other.accept()
        for _ in range(8):
            await asyncio.sleep(0.15)
            await other.send(Heartbeat(generation="g0", load=InstanceLoad()))
        assert watcher.num_lost == 0
        await until(lambda: watcher.num_lost == 1)

    with_session(test, timeout_s=1.0)


def test_refusals_and_other_versions_are_never_used() -> None:
    async def test(instance: Instance, other: Other, watcher: Watcher) -> None:
        hello = await other.receive(Hello)
        await other.send(Refused(session=hello.session, reason="another version"))
        await other.accept(protocol_version=99)
        await other.accept(session="someone else's")
        await other.send(Heartbeat(generation="g0", load=InstanceLoad(num_waiting=2)))
        await until(lambda: instance.load.num_waiting == 2)
        assert watcher.num_ready == 0
        assert not instance.is_usable

    with_session(test)


def test_goodbye_at_the_end() -> None:
    async def main() -> None:
        async with asyncio.timeout(60):
            context = zmq.asyncio.Context()
            other = Other(context)
            instance = Instance(
                other.endpoint, Role.DECODE, router_id="r", context=context, observer=Watcher(),
                settings=SessionSettings(heartbeat_interval_s=1, heartbeat_timeout_s=5),
            )  # fmt: skip
            running = asyncio.create_task(instance.run())
            await other.accept()
            await until(lambda: instance.is_usable)
            running.cancel()
            await other.receive(Goodbye)
            await asyncio.gather(running, return_exceptions=True)
            other.socket.close()
            await asyncio.to_thread(context.term)

    asyncio.run(main())


def read(directory: Path, own: str, peer: str) -> Curve:
    curve = read_curve(str(directory / f"{own}.secret"), str(directory / f"{peer}.public"))
    assert curve is not None
    return curve


def test_session_goes_over_curve(tmp_path: Path) -> None:
    for name in ("router", "instance"):
        make_key_pair(name, tmp_path)

    async def test(instance: Instance, other: Other, watcher: Watcher) -> None:
        await other.accept()
        await until(lambda: instance.is_usable)
        instance.start_leg(add_request("a"))
        assert (await other.receive(AddRequest)).request_id == "a"

    with_session(test, own=read(tmp_path, "router", "instance"), theirs=read(tmp_path, "instance", "router"))


@pytest.mark.parametrize(
    ("own", "theirs", "reason"),
    [
        (("stranger", "instance"), ("instance", "router"), "it takes neither this router's key nor its address"),
        (("router", "stranger"), ("instance", "router"), "no handshake: its CURVE key is another one"),
        (None, ("instance", "router"), "or only one side has keys"),
        (("router", "instance"), None, "or only one side has keys"),
    ],
)
def test_without_the_right_keys_there_is_no_session_and_a_reason(
    own: tuple[str, str] | None, theirs: tuple[str, str] | None, reason: str, tmp_path: Path
) -> None:
    for name in ("router", "instance", "stranger"):
        make_key_pair(name, tmp_path)

    async def test(instance: Instance, other: Other, watcher: Watcher) -> None:
        await until(lambda: instance.last_problem)
        assert reason in instance.last_problem
        assert instance.ready is None
        assert not await other.socket.poll(0)

    with_session(test, own=own and read(tmp_path, *own), theirs=theirs and read(tmp_path, *theirs))


def test_address_without_a_key_is_not_connected_to(tmp_path: Path) -> None:
    make_key_pair("router", tmp_path)
    (tmp_path / "some.public").write_text(f"10.0.0.1 {'1' * 64}\n10.0.0.2 {'2' * 64}\n")

    async def test(instance: Instance, other: Other, watcher: Watcher) -> None:
        await until(lambda: instance.last_problem)
        assert "has no key called 127.0.0.1:" in instance.last_problem
        assert not await other.socket.poll(0)

    with_session(test, own=read(tmp_path, "router", "some"))


def test_an_instance_whose_connection_is_gone_is_not_chosen_again() -> None:
    """Between the loss and its notice requests must not spend all their tries on an instance that cannot be reached."""

    async def test(instance: Instance, other: Other, watcher: Watcher) -> None:
        await other.accept()
        await until(lambda: instance.is_usable)
        other.socket.close()
        deadline = time.monotonic() + 10

        def send_until_it_fails() -> None:
            while time.monotonic() < deadline:  # without an await: the loop must not learn of the loss by itself
                instance.start_leg(add_request(f"r{time.monotonic()}"))

        with pytest.raises(InstanceLostError, match="is not connected"):
            send_until_it_fails()
        assert instance.ready is not None
        assert not instance.is_usable
        await until(lambda: watcher.num_lost == 1)
        other.open(other.endpoint)
        await other.accept("g1")
        await until(lambda: instance.is_usable)

    with_session(test)
