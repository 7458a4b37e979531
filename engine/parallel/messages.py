"""What the engine's process and its workers say to each other: msgspec in msgpack, nothing else.

A worker's life::

    engine                                worker
    WorkerStart ─────────────────────────>
                 <───────────────── Loaded   its share of the model is in memory
    WorkerPlan ──────────────────────────>
                 <──────────────── Started   KV memory, connector and model are ready
    Step (through shared memory) ────────>
                 <─────────────── StepDone   one for each step
    an empty frame ──────────────────────>   and the worker ends

Before `Started`, `Refused` says in one line why a worker cannot start.
"""

from __future__ import annotations

import dataclasses

import msgspec

from pdserve.connectors.base import ConnectorOutput
from pdserve.connectors.messages import MessageCodec, ServesRanks
from pdserve.connectors.registry import load_connector, require_ranks
from pdserve.engine.config import ConnectorSettings, EngineConfig
from pdserve.engine.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pdserve.kv_layout import Rank


class WorkerStart(msgspec.Struct, frozen=True):
    """Who the worker is.

    Attributes:
        config: the engine's settings.
        directory: the model's files.
        rank: the worker's.
        rendezvous: the file by which the stages find each other.
        exchange_fd: the memory that the ranks of the worker's stage share; None where it is the only one.
        buffer_fd: the shared memory of steps.
        wake_fd: a pipe's end; what its connector half writes there wakes the engine.
        process_name: for its log.
        log_level: for its log.
    """

    config: EngineConfig
    directory: str
    rank: Rank
    rendezvous: str
    exchange_fd: int | None
    buffer_fd: int
    wake_fd: int
    process_name: str
    log_level: str


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """The model is in memory; ``numerics`` is the class of its kernels."""

    numerics: str


class Started(msgspec.Struct, frozen=True, tag=True):
    """Steps can come."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A setting, a file or the connector's options are wrong."""

    message: str


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """What a step gave: the runner's output, and the connector's in its codec's form."""

    output: ModelRunnerOutput
    connector_output: bytes


Answer = Loaded | Started | Refused | StepDone


class Step(msgspec.Struct, frozen=True):
    """One step.

    Attributes:
        sampled_token_ids: of the step before, for the ranks that did not choose them.
        decision: the scheduler's, without the connector's part.
        connector_metadata: that part, in its codec's form.
    """

    sampled_token_ids: dict[str, int]
    decision: SchedulerOutput
    connector_metadata: bytes


class StepCodec:
    """Steps and their results to bytes and back.

    Args:
        connector: for what the connector's halves say to each other.
    """

    def __init__(self, connector: MessageCodec) -> None:
        self._connector = connector
        self._encoder = msgspec.msgpack.Encoder()
        self._step_decoder = msgspec.msgpack.Decoder(Step)

    def encode_step(self, step: SchedulerOutput, sampled_token_ids: dict[str, int]) -> bytes:
        """A step, and what the one before sampled."""
        metadata = self._connector.encode_metadata(step.connector_metadata)
        decision = dataclasses.replace(step, connector_metadata=None)
        return self._encoder.encode(Step(sampled_token_ids, decision, metadata))

    def decode_step(self, data: bytes) -> tuple[SchedulerOutput, dict[str, int]]:
        """See `encode_step`."""
        step = self._step_decoder.decode(data)
        metadata = self._connector.decode_metadata(step.connector_metadata)
        return dataclasses.replace(step.decision, connector_metadata=metadata), step.sampled_token_ids

    def encode_output(self, output: ModelRunnerOutput) -> bytes:
        """A step's result."""
        connector_output = self._connector.encode_output(output.connector_output)
        plain = dataclasses.replace(output, connector_output=ConnectorOutput())
        return self._encoder.encode(StepDone(plain, connector_output))

    def decode_output(self, done: StepDone) -> ModelRunnerOutput:
        """See `encode_output`."""
        return dataclasses.replace(done.output, connector_output=self._connector.decode_output(done.connector_output))


def build_step_codec(settings: ConnectorSettings, rank: Rank) -> StepCodec:
    """The codec of an engine with several ranks.

    Raises:
        ConfigError: its connector does not serve them.
    """
    connector = load_connector(settings.connector)
    require_ranks(settings.connector, connector, rank)
    assert isinstance(connector, ServesRanks)
    return StepCodec(MessageCodec(connector.message_types(settings.connector_options)))
