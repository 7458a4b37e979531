"""Engines put together without processes: one alone, or a prefill and a decode engine with a connector between.

The router's part is played here: hand over the first token and the transfer parameters, keep the token ids.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.engine.config import EngineConfig, build_config
from pdserve.engine.core import EngineCore
from pdserve.protocol import AddRequest, FinishReason, RequestOutput, Role, SamplingParams, TokenLogprobs

Prompt = Sequence[int]


@dataclass
class Answer:
    """What a request gave, from whichever engines took part."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    events: list[str] = field(default_factory=list)

    def take(self, output: RequestOutput) -> None:
        assert output.error is None, output.error
        self.token_ids += output.new_token_ids
        self.logprobs += output.logprobs or []
        self.num_cached_tokens += output.num_cached_tokens
        self.num_external_tokens += output.num_external_tokens
        self.events += [event.name for event in output.events]


def build_core(role: Role = Role.DECODE, engine_id: str = "test", **settings: Any) -> EngineCore:
    """An engine; one compute thread, settings by name."""
    config: EngineConfig = build_config(**{"connector": "null", "num_blocks": 1024, **settings})
    return EngineCore.build(config, role=role, engine_id=engine_id)


class Alone:
    """One engine."""

    def __init__(self, **settings: Any) -> None:
        self.core = build_core(**settings)
        self._count = 0

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> list[Answer]:
        """All prompts at once."""
        answers = [Answer() for _ in prompts]
        ids: dict[str, int] = {}
        for i, prompt in enumerate(prompts):
            self._count += 1
            ids[f"q{self._count}"] = i
            sampling = params if isinstance(params, SamplingParams) else params[i]
            self.core.add_request(
                AddRequest(request_id=f"q{self._count}", prompt_token_ids=list(prompt), sampling=sampling)
            )
        while any(answer.finish_reason is None for answer in answers):
            for output in self.core.step():
                answer = answers[ids[output.request_id]]
                answer.take(output)
                answer.finish_reason = output.finish_reason
        return answers

    def close(self) -> None:
        self.core.close()


class PDPair:
    """A prefill engine and a decode engine that share a store."""

    def __init__(
        self, *, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **both: Any
    ) -> None:
        self.prefill = build_core(Role.PREFILL, "prefill", **{**both, **(prefill or {})})
        self.decode = build_core(Role.DECODE, "decode", **{**both, **(decode or {})})
        self._count = 0

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]) -> list[Answer]:
        """All prompts at once, each through prefill, then decode, both engines stepping in turn."""
        answers = [Answer() for _ in prompts]
        requests: dict[str, tuple[int, AddRequest]] = {}
        for i, prompt in enumerate(prompts):
            self._count += 1
            sampling = params if isinstance(params, SamplingParams) else params[i]
            message = AddRequest(
                request_id=f"q{self._count}", prompt_token_ids=list(prompt), sampling=sampling, handoff=True
            )
            requests[message.request_id] = (i, message)
            self.prefill.add_request(message)
        while any(answer.finish_reason is None for answer in answers):
            self._step(self.prefill, requests, answers)
            self._step(self.decode, requests, answers)
        return answers

    def _step(self, core: EngineCore, requests: dict[str, tuple[int, AddRequest]], answers: list[Answer]) -> None:
        for output in core.step():
            i, message = requests[output.request_id]
            answers[i].take(output)
            if output.finish_reason is FinishReason.HANDOFF:
                self.decode.add_request(
                    AddRequest(
                        request_id=message.request_id,
                        prompt_token_ids=message.prompt_token_ids,
                        output_token_ids=list(answers[i].token_ids),
                        sampling=message.sampling,
                        kv_transfer_params=output.kv_transfer_params,
                    )
                )
            else:
                answers[i].finish_reason = output.finish_reason

    def settle(self, timeout_s: float = 20.0) -> None:
        """Step until no transfer is under way."""
        deadline = time.monotonic() + timeout_s
        while self.prefill.has_transfers() or self.decode.has_transfers():
            assert time.monotonic() < deadline, "transfers do not end"
            self.prefill.step()
            self.decode.step()

    @property
    def num_used_blocks(self) -> int:
        return self.prefill.get_load().num_used_blocks + self.decode.get_load().num_used_blocks

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()
