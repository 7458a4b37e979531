"""A producer's side channel under frames that no consumer sends: it lives, and the next hand-off is exact as ever."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import zmq
from hostile_frames import hostile_frames
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("nixl")

from pdserve.connectors.nixl import wire
from pdserve.connectors.testing.engines.tiny_model import write_tiny_model
from pdserve.engine.config import build_config
from pdserve.engine.core import EngineCore
from pdserve.protocol import AddRequest, FinishReason, KVTransferParams, RequestOutput, Role, SamplingParams

DEADLINE_S = 60.0
PROMPT = list(range(5, 40))
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


@dataclass
class Pair:
    """A prefill and a decode engine."""

    prefill: EngineCore
    decode: EngineCore
    num_requests: int = 0

    def prefill_one(self) -> tuple[int, KVTransferParams]:
        """First token of the prompt, and where its KV waits."""
        self.num_requests += 1
        name = f"p{self.num_requests}"
        self.prefill.add_request(
            AddRequest(request_id=name, prompt_token_ids=PROMPT, sampling=GREEDY, handoff=True, cache_salt=name)
        )
        first: list[int] = []
        for output in self.steps(self.prefill):
            first += output.new_token_ids
            if output.finish_reason is FinishReason.HANDOFF:
                assert output.kv_transfer_params is not None
                return first[0], output.kv_transfer_params
        raise AssertionError("no hand-off came")

    def decode_one(self, first: int, params: KVTransferParams) -> tuple[list[int], int]:
        """All tokens, and how many of the prompt's came from the prefill engine."""
        name = f"d{self.num_requests}"
        self.decode.add_request(
            AddRequest(
                request_id=name,
                prompt_token_ids=PROMPT,
                output_token_ids=[first],
                sampling=GREEDY,
                kv_transfer_params=params,
                cache_salt=f"p{self.num_requests}",
            )
        )
        tokens, num_external = [first], 0
        for output in self.steps(self.decode):
            tokens += output.new_token_ids
            num_external += output.num_external_tokens
            if output.finish_reason is not None:
                return tokens, num_external
        raise AssertionError("no answer came")

    def steps(self, engine: EngineCore) -> Iterator[RequestOutput]:
        """Outputs of an engine, while the other one goes on too."""
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            for other in (self.prefill, self.decode):
                outputs = other.step()
                if other is engine:
                    yield from outputs


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model = write_tiny_model(tmp_path_factory.mktemp("side-channel"))
    engines = []
    for role in (Role.PREFILL, Role.DECODE):
        config = build_config(
            model=str(model), connector="nixl", connector_options={"lease_s": 30.0}, block_size=8, num_blocks=64
        )
        engines.append(EngineCore.build(config, role=role, engine_id=f"{role}@fuzz", on_progress=lambda _: None))
    yield Pair(*engines)
    for engine in engines:
        engine.close()


def build_messages(pair: Pair, transfer_id: str) -> list[wire.ConsumerMessage]:
    return [
        wire.Hello(pair.prefill.identity),
        wire.Open(transfer_id, b"digest"),
        wire.Open("never", b"digest"),
        wire.Extend([transfer_id, "never"]),
        wire.Close("never", 3),
        wire.Cancel("never"),
    ]


def test_hostile_consumers_change_nothing_for_honest_ones(pair: Pair) -> None:
    first, params = pair.prefill_one()
    address = params.payload["address"]
    expected = pair.decode_one(first, params)
    assert expected[1] == len(PROMPT)
    context = zmq.Context()
    frames = hostile_frames(build_messages(pair, params.transfer_id))
    single = frames.map(lambda frame: [frame])

    @settings(max_examples=80, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(messages=st.lists(single | single | st.lists(frames, min_size=1, max_size=3), max_size=8))
    def test(messages: list[list[bytes]]) -> None:
        first, params = pair.prefill_one()
        hostile = context.socket(zmq.DEALER)
        hostile.setsockopt(zmq.LINGER, 1000)
        hostile.connect(address)
        for parts in messages:
            hostile.send_multipart(parts)
        hostile.send(wire.encode(wire.Hello(pair.prefill.identity)))
        assert hostile.poll(DEADLINE_S * 1000), "the side channel does not answer"
        hostile.close()
        assert pair.decode_one(first, params) == expected

    try:
        test()
        hostile = context.socket(zmq.DEALER)
        hostile.setsockopt(zmq.LINGER, 0)
        hostile.connect(address)
        hostile.send(b"x" * (wire.MAX_FRAME_BYTES + 1))
        assert pair.decode_one(*pair.prefill_one()) == expected
        hostile.close()
    finally:
        context.term()
    deadline_s = time.monotonic() + DEADLINE_S
    while pair.prefill.get_load().num_used_blocks or pair.decode.get_load().num_used_blocks:
        pair.prefill.step()
        pair.decode.step()
        assert time.monotonic() < deadline_s, "blocks stay in use"
