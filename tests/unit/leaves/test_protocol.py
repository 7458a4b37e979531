"""The wire: every message survives, nothing else is taken."""

from __future__ import annotations

import msgspec
import pytest

from pdserve import protocol as p
from pdserve.kv_layout import KVCacheSpec, ModelIdentity

IDENTITY = ModelIdentity(
    weights="w", architecture="a", compute_dtype="float32", numerics="n", kv=KVCacheSpec(1, 1, 4, 16, "float32")
)
LOAD = p.InstanceLoad(num_waiting=1, num_running=2, num_used_blocks=3, num_blocks=4)
ROUTER_MESSAGES = [
    p.Hello(router_id="r", session="s"),
    p.AddRequest(
        request_id="q",
        prompt_token_ids=[1, 2],
        output_token_ids=[3],
        sampling=p.SamplingParams(seed=2**63 - 1, logit_bias={5: -1.5}, stop=("a",), max_tokens=None),
        handoff=True,
        kv_transfer_params=p.KVTransferParams(connector="c", transfer_id="t", payload={"path": "x", "n": 1}),
        timeout_s=1.5,
    ),
    p.AbortRequests(["q"]),
    p.Goodbye(),
]
INSTANCE_MESSAGES = [
    p.Ready(
        session="s",
        instance_id="i",
        generation="g",
        role=p.Role.PREFILL,
        model="m",
        identity=IDENTITY,
        limits=p.InstanceLimits(
            max_model_len=1, max_num_seqs=1, max_queue_len=1, num_blocks=1, vocab_size=1, max_logprobs=1
        ),
        connector="null",
        load=LOAD,
    ),
    p.Refused(session="s", reason="why"),
    p.Heartbeat(generation="g", load=LOAD),
    p.CacheEvents(stored=[b"\x00" * 32], evicted=[b"\xff" * 32], replaces_all=True),
    p.StepOutputs(
        outputs=[
            p.RequestOutput(
                request_id="q",
                new_token_ids=[1],
                logprobs=[p.TokenLogprobs(1, -0.5, 1, [1, 2], [-0.5, -1.0])],
                finish_reason=p.FinishReason.STOP,
                error=p.WireError(code="c", message="m"),
                events=[p.TimelineEvent("queued", 1, {"num_tokens": 2})],
            )
        ],
        load=LOAD,
    ),
]


@pytest.mark.parametrize("message", ROUTER_MESSAGES, ids=lambda m: type(m).__name__)
def test_router_messages_survive(message: p.RouterMessage) -> None:
    assert p.decode_router_message(p.encode(message)) == message


@pytest.mark.parametrize("message", INSTANCE_MESSAGES, ids=lambda m: type(m).__name__)
def test_instance_messages_survive(message: p.InstanceMessage) -> None:
    assert p.decode_instance_message(p.encode(message)) == message


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x00garbage",
        msgspec.msgpack.encode({"type": "add", "request_id": 5}),
        msgspec.msgpack.encode({"type": "unknown"}),
        msgspec.msgpack.encode([1, 2, 3]),
        p.encode(INSTANCE_MESSAGES[0]),
    ],
)
def test_anything_else_is_refused(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        p.decode_router_message(frame)


@pytest.mark.parametrize("name", ["", "a\nb", "a\n", "a\x1b[2J", "é", "x" * 257])
def test_names_that_could_harm_a_log_are_no_names(name: str) -> None:
    hello = p.encode(p.Hello(router_id="r", session="s"))
    for field in ("router_id", "session"):
        fields = {**msgspec.msgpack.decode(hello), field: name}
        with pytest.raises(msgspec.ValidationError) as caught:
            p.decode_router_message(msgspec.msgpack.encode(fields))
        assert "\n" not in str(caught.value)
    with pytest.raises(msgspec.ValidationError):
        p.decode_router_message(p.encode(msgspec.structs.replace(ROUTER_MESSAGES[1], request_id=name)))


@pytest.mark.parametrize(
    "frame",
    [b"\x81\xa4type\xa3\xff\xfe\xfd", b"\x91" * 5000 + b"\xc0", msgspec.msgpack.encode({"type": "x" * 10**6})],
)
def test_frames_fail_in_one_way_that_is_short(frame: bytes) -> None:
    for decode in (p.decode_router_message, p.decode_instance_message):
        with pytest.raises(msgspec.DecodeError) as caught:
            decode(frame)
        assert len(str(caught.value)) <= 200
