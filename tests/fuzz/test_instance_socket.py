"""An instance's socket under frames that no router sends: it lives, and the next router's request is served as ever."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import pytest
import zmq
from hostile_frames import hostile_frames
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served_engine import DEADLINE_S, ServedEngine, served_engine, wait_until

from pdserve.engine.server import socket_thread
from pdserve.protocol import (
    AbortRequests,
    AddRequest,
    Goodbye,
    Hello,
    KVTransferParams,
    Ready,
    Role,
    SamplingParams,
    StepOutputs,
    decode_instance_message,
    encode,
)

PROMPT = list(range(5, 30))
PAYLOADS = {
    "shared_storage": {},
    "nixl": {
        "transfer_id": "t", "generation": "g", "address": "tcp://127.0.0.1:9", "lease_s": 1.0, "block_ids": [0, 1],
    },
}  # fmt: skip


def build_messages(connector: str) -> list[object]:
    params = KVTransferParams(
        connector=connector, transfer_id="t", engine_id="e", num_tokens=25, num_bytes=9, payload=PAYLOADS[connector]
    )
    rich = SamplingParams(
        max_tokens=3, min_tokens=1, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=0.5, frequency_penalty=0.5, logit_bias={3: 1.0}, seed=7, stop=("x",), stop_token_ids=(9,),
        logprobs=2, prompt_logprobs=2,
    )  # fmt: skip
    short = SamplingParams(max_tokens=3, temperature=0.0)
    return [
        Hello(router_id="hostile", session="s", wants_cache_events=True),
        AddRequest(request_id="a", prompt_token_ids=PROMPT, sampling=rich, priority=3, cache_salt="y", timeout_s=9.0),
        AddRequest(request_id="b", prompt_token_ids=PROMPT, sampling=short, handoff=True),
        AddRequest(
            request_id="c", prompt_token_ids=PROMPT, output_token_ids=[4], sampling=short, kv_transfer_params=params
        ),
        AbortRequests(["a", "b", "never"]),
        Goodbye(),
    ]


class Peer:
    """One connection."""

    def __init__(self, instance: ServedEngine) -> None:
        self.instance = instance
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 1000)
        self.socket.connect(f"tcp://127.0.0.1:{instance.port}")

    def receive(self, kind: type) -> object:
        deadline_s = time.monotonic() + DEADLINE_S
        while True:
            while not self.socket.poll(100):
                assert self.instance.is_alive, "the instance ended"
                assert time.monotonic() < deadline_s, f"no {kind.__name__} came"
            message = decode_instance_message(self.socket.recv())
            if isinstance(message, kind):
                return message

    def open(self) -> None:
        """A session, as a router opens one."""
        name = uuid.uuid4().hex
        self.socket.send(encode(Hello(router_id=name, session=name)))
        self.receive(Ready)

    def ask(self) -> list[int]:
        """The tokens of an honest request."""
        sampling = SamplingParams(max_tokens=3, temperature=0.0)
        self.socket.send(encode(AddRequest(request_id="q", prompt_token_ids=PROMPT, sampling=sampling)))
        tokens: list[int] = []
        while True:
            message = self.receive(StepOutputs)
            assert isinstance(message, StepOutputs)
            for output in message.outputs:
                assert output.error is None
                tokens += output.new_token_ids
                if output.finish_reason is not None:
                    return tokens

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture(scope="module", params=["shared_storage", "nixl"])
def connector(request: pytest.FixtureRequest) -> str:
    if request.param == "nixl":
        pytest.importorskip("nixl")
    return str(request.param)


@pytest.fixture(scope="module")
def instance(connector: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    directory = tmp_path_factory.mktemp(connector)
    options = {"path": str(directory / "store")} if connector == "shared_storage" else {"answer_timeout_s": 0.2}
    with served_engine(directory, Role.DECODE, connector, options) as made:
        yield made


@pytest.fixture(scope="module")
def honest(instance: ServedEngine) -> Iterator[Peer]:
    made = Peer(instance)
    made.open()
    yield made
    made.close()


@pytest.fixture(scope="module")
def expected(honest: Peer) -> list[int]:
    return honest.ask()


def test_hostile_routers_change_nothing_for_honest_ones(
    instance: ServedEngine, honest: Peer, expected: list[int], connector: str
) -> None:
    frames = hostile_frames(build_messages(connector))
    single = frames.map(lambda frame: [frame])
    messages = st.lists(single | single | st.lists(frames, max_size=3), min_size=1, max_size=8)

    @settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(messages=messages, has_session=st.booleans())
    def test(messages: list[list[bytes]], has_session: bool) -> None:
        hostile = Peer(instance)
        try:
            if has_session:
                hostile.open()
            for parts in messages:
                hostile.socket.send_multipart(parts or [b""])
            assert honest.ask() == expected
        finally:
            hostile.close()
        assert instance.is_alive

    test()
    assert instance.count("dropped_frames_total") > 100
    assert instance.count("refused_requests_total") > 10
    wait_until(lambda: instance.count("sessions") == 1, "the end of every hostile session")
    wait_until(lambda: instance.engine.get_load().num_used_blocks == 0, "blocks coming back")
    assert honest.ask() == expected


def test_frames_beyond_the_bound_are_dropped_or_end_the_connection(
    instance: ServedEngine, honest: Peer, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_thread, "MAX_FRAME_BYTES", 1 << 16)
    before = instance.count("dropped_frames_total")
    hostile = Peer(instance)
    hostile.open()
    hostile.socket.send(b"x" * ((1 << 16) + 1))
    wait_until(lambda: instance.count("dropped_frames_total") == before + 1, "the frame being dropped")
    # Twice what a frame may have: ZMQ cuts the connection before it is whole.
    hostile.socket.send(b"x" * (129 << 20))
    assert honest.ask() == expected
    hostile.close()
    assert instance.count("dropped_frames_total") == before + 1
