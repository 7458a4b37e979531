"""A scheduler's surroundings without a model: a clock that is set by hand, a runner that makes up tokens, and a
connector that does what the test says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.connectors.base import (
    ConnectorMetadata,
    ConnectorOutput,
    FinishDecision,
    KVRequest,
    MatchResult,
    StepPlan,
)
from pdserve.engine.config import SchedulerSettings
from pdserve.engine.kv_cache_manager import KVCacheManager
from pdserve.engine.metrics import EngineStats
from pdserve.engine.request import Request
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pdserve.kv_layout import BlockHasher
from pdserve.protocol import AddRequest, KVTransferParams, RequestOutput, SamplingParams, TokenLogprobs

BLOCK_SIZE = 4
EOS = 2


@dataclass
class ScriptedConnector:
    """Answers lookups from a dict, keeps what it was told.

    Synchronous loads leave those blocks unfilled whose places in the request's table are in ``unfilled``, and say so in
    ``report``.
    """

    matches: dict[str, list[MatchResult]] = field(default_factory=dict)
    decisions: dict[str, FinishDecision] = field(default_factory=dict)
    allocated: list[tuple[str, tuple[int, ...], int]] = field(default_factory=list)
    finished: list[tuple[str, int, bool]] = field(default_factory=list)
    plans: list[StepPlan] = field(default_factory=list)
    seen_params: list[KVTransferParams | None] = field(default_factory=list)
    report: ConnectorOutput = field(default_factory=ConnectorOutput)
    unfilled: set[int] = field(default_factory=set)

    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> MatchResult:
        self.seen_params.append(request.kv_transfer_params)
        answers = self.matches.get(request.request_id, [])
        if not answers:
            return MatchResult(0)
        return answers.pop(0) if len(answers) > 1 else answers[0]

    def update_state_after_alloc(
        self,
        request: KVRequest,
        block_ids: Sequence[int],
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        self.allocated.append((request.request_id, tuple(block_ids), num_external_tokens))
        if num_external_tokens:
            match = self.matches.pop(request.request_id)[-1]
            places = set() if match.is_async else self.unfilled & set(range(len(block_ids)))
            start = num_computed_tokens // BLOCK_SIZE
            self.report.invalid_block_ids.update(block_ids[place] for place in places if place >= start)

    def build_connector_metadata(self, plan: StepPlan) -> ConnectorMetadata:
        self.plans.append(plan)
        return None

    def update_from_output(self, output: ConnectorOutput) -> None:
        pass

    def request_finished(
        self, request: KVRequest, block_ids: Sequence[int], num_computed_tokens: int, *, handoff: bool
    ) -> FinishDecision:
        self.finished.append((request.request_id, num_computed_tokens, handoff))
        return self.decisions.get(request.request_id, FinishDecision())

    def close(self) -> None:
        pass


class SchedulerHarness:
    """A real scheduler over a real block pool, with a runner that samples ``next_token`` for everyone.

    Its logprobs of a prompt's tokens name their positions.
    """

    def __init__(self, *, num_blocks: int = 64, prefix_caching: bool = True, **settings: object) -> None:
        self.now_s = 0.0
        self.connector = ScriptedConnector()
        self.kv_cache = KVCacheManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=prefix_caching)
        self.stats = EngineStats()
        self.scheduler = Scheduler(
            SchedulerSettings(**settings),  # type: ignore[arg-type]
            self.kv_cache,
            self.connector,
            eos_token_ids=frozenset({EOS}),
            stats=self.stats,
            clock=lambda: self.now_s,
        )
        self.next_token = 7
        self.last_step: SchedulerOutput | None = None
        self._lengths: dict[str, int] = {}
        self._num_wanted: dict[str, int] = {}
        self._num_added = 0

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        output: Sequence[int] = (),
        handoff: bool = False,
        priority: int = 0,
        salt: str = "",
        timeout_s: float | None = None,
        params: KVTransferParams | None = None,
        **sampling: object,
    ) -> Request:
        message = AddRequest(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            output_token_ids=list(output),
            sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 100, **sampling}),  # type: ignore[arg-type]
            handoff=handoff,
            priority=priority,
            cache_salt=salt,
            timeout_s=timeout_s,
            kv_transfer_params=params,
        )
        self._num_added += 1
        request = Request(
            message,
            hasher=BlockHasher("f" * 32, cache_salt=salt),
            block_size=BLOCK_SIZE,
            max_total_tokens=min(len(prompt) + (message.sampling.max_tokens or 1000), 200),
            arrival_order=self._num_added,
            now_s=self.now_s,
        )
        self.scheduler.add_request(request)
        return request

    def step(self, report: ConnectorOutput | None = None, **tokens: int) -> list[RequestOutput]:
        """One step; ``tokens`` overrides the sampled token of single requests."""
        self.connector.report = report or ConnectorOutput()
        outputs = self.scheduler.expire_requests()
        step = self.scheduler.schedule()
        self.last_step = step
        for new in step.new_requests:
            self._lengths[new.request_id] = len(new.token_ids)
            self._num_wanted[new.request_id] = new.num_prompt_tokens if new.wants_prompt_logprobs else 0
        result = ModelRunnerOutput(connector_output=self.connector.report)
        for item in step.scheduled:
            end = item.num_computed_tokens + item.num_scheduled_tokens
            if num_wanted := self._num_wanted[item.request_id]:
                positions = range(item.num_computed_tokens + 1, min(end + 1, num_wanted))
                result.prompt_logprobs[item.request_id] = [TokenLogprobs(i, 0.0, 1, [], []) for i in positions]
            if end == self._lengths[item.request_id]:
                result.sampled_token_ids[item.request_id] = tokens.get(item.request_id, self.next_token)
                self._lengths[item.request_id] += 1
        return outputs + self.scheduler.update_from_output(step, result)

    def run_until_idle(self, max_steps: int = 1000) -> list[RequestOutput]:
        outputs = []
        for _ in range(max_steps):
            if not self.scheduler.has_work and not self.scheduler._waiting:
                return outputs
            outputs += self.step()
        raise AssertionError("requests do not end")

    @property
    def scheduled(self) -> dict[str, int]:
        """What the last step computed, by request."""
        assert self.last_step is not None
        return {item.request_id: item.num_scheduled_tokens for item in self.last_step.scheduled}

    @property
    def num_used_blocks(self) -> int:
        return self.kv_cache.pool.num_used_blocks
