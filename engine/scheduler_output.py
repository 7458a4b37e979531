"""The messages between scheduler and model runner: one decision down, one result up, each step.

New requests travel whole, known ones as a difference: the runner keeps their token ids and block tables. Plain
values only, no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from pdserve.connectors.base import ConnectorMetadata, ConnectorOutput
from pdserve.protocol import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request the runner does not know, or no longer (it was preempted).

    Attributes:
        request_id: the engine's id.
        token_ids: prompt and output so far.
        num_prompt_tokens: how many of them are the prompt.
        block_ids: its whole block table.
        sampling: the client's parameters; the seed is set.
        wants_prompt_logprobs: prompt logprobs are still to be made.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    block_ids: tuple[int, ...]
    sampling: SamplingParams
    wants_prompt_logprobs: bool


class ScheduledRequest(msgspec.Struct, frozen=True):
    """What one request computes in this step. A struct: one is made for each request in each step.

    Attributes:
        request_id: the engine's id.
        num_computed_tokens: tokens whose KV stands in its blocks before the step.
        num_scheduled_tokens: tokens to compute; a token is sampled when they reach the last known one.
        new_block_ids: blocks added behind the table that the runner knows.
    """

    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    new_block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step.

    Attributes:
        new_requests: first step, or first after a preemption.
        scheduled: every request that computes in this step, new ones included.
        dropped_request_ids: requests the runner forgets (finished, aborted, preempted).
        num_tokens: sum of the scheduled tokens.
        connector_metadata: from the connector's scheduler half to its workers.
        finished_sending_due: requests whose sending the workers will report, each given once.
        loads_started: requests whose asynchronous load begins with this step's message, and whose end the workers will
            report.
    """

    new_requests: tuple[NewRequest, ...]
    scheduled: tuple[ScheduledRequest, ...]
    dropped_request_ids: tuple[str, ...]
    num_tokens: int
    connector_metadata: ConnectorMetadata
    finished_sending_due: tuple[str, ...]
    loads_started: tuple[str, ...]


@dataclass(slots=True)
class ModelRunnerOutput:
    """What a step gave.

    Attributes:
        sampled_token_ids: one token for each request that reached its last known token.
        logprobs: for those that asked.
        prompt_logprobs: this chunk's entries, for those that asked.
        failed: requests the runner could not compute, with the reason; the others are exact.
        refused: requests whose grammar cannot be followed any further, with the reason.
        connector_output: from the connector's worker half.
    """

    sampled_token_ids: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    connector_output: ConnectorOutput = field(default_factory=ConnectorOutput)
