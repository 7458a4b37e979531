"""Steps and results are the same on both sides of the wire."""

from __future__ import annotations

import dataclasses

import msgspec

from pdserve.connectors.base import ConnectorOutput
from pdserve.connectors.blocks.messages import BlockTransfer, LoadRequest, StepMetadata
from pdserve.engine.config import ConnectorSettings, build_config
from pdserve.engine.parallel.messages import Answer, StepDone, WorkerStart, build_step_codec
from pdserve.engine.scheduler_output import ModelRunnerOutput, NewRequest, ScheduledRequest, SchedulerOutput
from pdserve.kv_layout import Rank
from pdserve.protocol import SamplingParams, TokenLogprobs

RANK = Rank(tensor_parallel_size=2)
STEP = SchedulerOutput(
    new_requests=(
        NewRequest("a", (1, 2, 3), 3, (7, 9), SamplingParams(seed=1 << 62, stop=("x",)), wants_prompt_logprobs=True),
    ),
    scheduled=(ScheduledRequest("a", 0, 3), ScheduledRequest("b", 40, 1, (11,))),
    dropped_request_ids=("c",),
    num_tokens=4,
    connector_metadata=StepMetadata([LoadRequest("d", 20, [BlockTransfer(b"\x00\xff" * 8, 16, 3)])]),
    loads_started=("d",),
    finished_sending_due=("e",),
)


def test_a_step_arrives_as_it_was() -> None:
    codec = build_step_codec(ConnectorSettings(connector="memory"), RANK)
    assert codec.decode_step(codec.encode_step(STEP, {"b": 5})) == (STEP, {"b": 5})


def test_a_result_arrives_as_it_was() -> None:
    codec = build_step_codec(ConnectorSettings(connector="memory"), RANK)
    logprobs = TokenLogprobs(token_id=5, logprob=-0.5, rank=1, top_ids=[5, 6], top_logprobs=[-0.5, -1.5])
    output = ModelRunnerOutput(
        sampled_token_ids={"a": 5},
        logprobs={"a": logprobs},
        prompt_logprobs={"a": [logprobs]},
        failed={"b": "why"},
        connector_output=ConnectorOutput(
            finished_sending={"e"}, failed_receiving={"d": 16}, invalid_block_ids={3}, received_bytes={"d": 1 << 40}
        ),
    )
    done = msgspec.msgpack.decode(codec.encode_output(output), type=Answer)
    assert isinstance(done, StepDone)
    assert codec.decode_output(done) == output


def test_a_worker_gets_the_settings_as_they_are() -> None:
    config = build_config(model="x", connector_options={"path": "/a", "n": 3, "nested": {"b": [True, None]}})
    start = WorkerStart(config, "/m", RANK, "/r", 6, 5, 4, "p", "INFO")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(start), type=WorkerStart) == start
    assert dataclasses.asdict(config)["connector"]["connector_options"]["nested"] == {"b": [True, None]}
