"""A prefill and a decode engine with the connector under test between them, and one engine alone as the oracle.

The router's part is played here: hand over the first token and the transfer parameters, keep the tokens, abort.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.connectors.testing.bench import Bench
from pdserve.connectors.testing.violations import NotOfferedError, RuleViolationError
from pdserve.engine.config import build_config
from pdserve.engine.core import EngineCore
from pdserve.errors import EngineError
from pdserve.protocol import AddRequest, FinishReason, RequestOutput, Role, SamplingParams

BLOCK_SIZE = 8
_TIMEOUT_S = 60.0
_PAUSE_S = 0.0003
_LEASE_S = 3.0
_GAUGES_AT_REST: Sequence[tuple[str, dict[str, str]]] = (
    ("transfers_running", {"direction": "load"}),
    ("transfers_running", {"direction": "save"}),
    ("leases", {}),
)


@dataclass
class Answer:
    """What a request gave, from whichever engines took part."""

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    """Prompt tokens that the decode engine did not compute."""
    is_aborted: bool = False

    @property
    def is_over(self) -> bool:
        """Whether nothing more is expected."""
        return self.is_aborted or self.finish_reason is not None


def build_oracle(model: Path) -> EngineCore:
    """One engine, in which a request runs alone, as a whole and without a connector."""
    config = build_config(
        model=str(model),
        connector="null",
        connector_options={},
        block_size=BLOCK_SIZE,
        num_blocks=256,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
    )
    return EngineCore.build(config, role=Role.DECODE, engine_id="oracle", on_progress=_ignore)


def answer_alone(oracle: EngineCore, prompt: Sequence[int], sampling: SamplingParams) -> Answer:
    """What one engine gives."""
    answer = Answer()
    oracle.add_request(AddRequest(request_id="alone", prompt_token_ids=list(prompt), sampling=sampling))
    while not answer.is_over:
        for output in oracle.step():
            _take(answer, output)
            answer.finish_reason = output.finish_reason
    return answer


class EnginePair:
    """Two engines.

    Args:
        bench: whose target gives the connector.
        model: directory of the model.
        prefill: engine settings of the prefill engine, by name.
        decode: of the decode engine.
    """

    def __init__(
        self,
        bench: Bench,
        model: Path,
        *,
        prefill: Mapping[str, Any] | None = None,
        decode: Mapping[str, Any] | None = None,
    ) -> None:
        self._bench = bench
        self._model = model
        self._serial = 0
        self.num_preemptions = 0
        self.prefill = self._build(Role.PREFILL, prefill or {})
        self.decode = self._build(Role.DECODE, decode or {})
        self._answers: dict[str, Answer] = {}
        self._requests: dict[str, AddRequest] = {}

    def submit(self, prompt: Sequence[int], sampling: SamplingParams) -> tuple[str, Answer]:
        """A request arrives at the prefill engine."""
        self._serial += 1
        request_id = f"q{self._serial}"
        message = AddRequest(request_id=request_id, prompt_token_ids=list(prompt), sampling=sampling, handoff=True)
        self._requests[request_id] = message
        self._answers[request_id] = Answer()
        self.prefill.add_request(message)
        return request_id, self._answers[request_id]

    def abort(self, request_id: str) -> None:
        """The client leaves."""
        self._answers[request_id].is_aborted = True
        for engine in (self.prefill, self.decode):
            engine.abort_requests([request_id])

    def step(self) -> None:
        """One step of each engine."""
        for engine in (self.prefill, self.decode):
            for output in engine.step():
                self._take_output(engine, output)
        time.sleep(_PAUSE_S)

    def run(self) -> None:
        """Step until every request is over.

        Raises:
            RuleViolationError: one never is.
        """
        deadline = time.monotonic() + _TIMEOUT_S
        while not all(answer.is_over for answer in self._answers.values()):
            self.step()
            if time.monotonic() > deadline:
                raise RuleViolationError("R9", "a request between two engines never came to its end")

    def settle(self, timeout_s: float) -> None:
        """Step until no transfer is under way and no block is held.

        Raises:
            RuleViolationError: blocks stay in use.
        """
        deadline = time.monotonic() + timeout_s
        while self.prefill.has_transfers() or self.decode.has_transfers() or self.num_used_blocks:
            self.step()
            if time.monotonic() > deadline:
                raise RuleViolationError("R9", f"{self.num_used_blocks} blocks stay in use when all requests are over")
        self._require_quiet_gauges()

    @property
    def num_used_blocks(self) -> int:
        """Blocks that requests or transfers hold, in both engines."""
        return self.prefill.get_load().num_used_blocks + self.decode.get_load().num_used_blocks

    def count_hits(self) -> dict[str, float]:
        """Blocks that the decode engine's lookups found, by connector."""
        return self._count_blocks("pdserve_kv_lookup_blocks_total", "result", "hit")

    def count_loaded_blocks(self) -> dict[str, float]:
        """Blocks that the decode engine's connector says it loaded, by connector."""
        return self._count_blocks("pdserve_kv_transfer_blocks_total", "direction", "load")

    def close(self) -> None:
        """End both engines."""
        for engine in (self.prefill, self.decode):
            engine.close()

    def _require_quiet_gauges(self) -> None:
        for engine in (self.prefill, self.decode):
            for gauge, labels in _GAUGES_AT_REST:
                value = engine.get_stats().registry.get_sample_value(f"pdserve_kv_{gauge}", labels)
                if value != 0:
                    raise RuleViolationError("R23", f"{gauge} {labels} is {value} when all requests are over")

    def _count_blocks(self, name: str, label: str, value: str) -> dict[str, float]:
        return {
            sample.labels["connector"]: sample.value
            for metric in self.decode.get_stats().registry.collect()
            for sample in metric.samples
            if sample.name == name and sample.labels[label] == value and sample.value
        }

    def _build(self, role: Role, settings: Mapping[str, Any]) -> EngineCore:
        target = self._bench.target
        connector = target.connector
        options = target.build_options(role.value, role)
        with contextlib.suppress(NotOfferedError):
            options = target.set_lease(options, _LEASE_S)
        defaults = {"block_size": BLOCK_SIZE, "num_blocks": 256, "max_num_batched_tokens": 256}
        config = build_config(
            **{
                "model": str(self._model),
                "connector": f"{connector.__module__}:{connector.__qualname__}",
                "connector_options": options,
                **defaults,
                **settings,
            }
        )
        engine_id = self._bench.build_context(role, role.value).engine_id
        return EngineCore.build(config, role=role, engine_id=engine_id, on_progress=_ignore)

    def _take_output(self, engine: EngineCore, output: RequestOutput) -> None:
        answer, message = self._answers[output.request_id], self._requests[output.request_id]
        self.num_preemptions += sum(event.name == "preempted" for event in output.events)
        if answer.is_aborted:
            return
        _take(answer, output)
        if engine is self.decode:
            answer.num_cached_tokens += output.num_cached_tokens
        if output.finish_reason is not FinishReason.HANDOFF:
            answer.finish_reason = output.finish_reason
            return
        self.decode.add_request(
            AddRequest(
                request_id=message.request_id,
                prompt_token_ids=message.prompt_token_ids,
                output_token_ids=list(answer.token_ids),
                sampling=message.sampling,
                kv_transfer_params=output.kv_transfer_params,
            )
        )


def _take(answer: Answer, output: RequestOutput) -> None:
    if output.error is not None:
        raise EngineError(output.error.message)
    answer.token_ids += output.new_token_ids


def _ignore(_: str) -> None:
    """Nobody is told how building goes."""
