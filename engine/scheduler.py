"""Who computes how many tokens in the next step.

Chunked prefill, prefix hits, KV from a connector and resumption after a preemption are all the same question:
how many of the request's known tokens are not computed yet. The scheduler owns the requests and their blocks,
speaks token counts and block ids, and imports no torch.

A request's way::

    add_request ──> waiting ──(admit)──> running ──(finish)──> gone
                       │  ^                 │
        (external KV)  │  │ (loaded)        │ (preempt: blocks freed, computed again later)
                       v  │                 │
                     loading                │
                       ^──────── waiting <──┘

Running requests and the waiting queue are both kept in the policy's order, so the last running one is always
the one to preempt.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Iterable

import msgspec

from pdserve.connectors.base import (
    ConnectorOutput,
    KVConnectorScheduler,
    ScheduledTokens,
    StepPlan,
)
from pdserve.engine.block_accounting import BlockHolding
from pdserve.engine.config import SchedulerSettings
from pdserve.engine.kv_cache_manager import KVCacheManager
from pdserve.engine.kv_transfers import LOAD_FAILED, KVTransfers
from pdserve.engine.metrics import EngineStats
from pdserve.engine.policies import RequestQueue
from pdserve.engine.request import Request, RequestStatus
from pdserve.engine.runner_view import RunnerView
from pdserve.engine.scheduler_output import (
    ModelRunnerOutput,
    NewRequest,
    ScheduledRequest,
    SchedulerOutput,
)
from pdserve.errors import OverloadedError
from pdserve.protocol import FinishReason, RequestOutput, WireError


class Admission(enum.Enum):
    """What became of a waiting request's turn."""

    ADMITTED = enum.auto()
    NOT_NOW = enum.auto()
    """Its KV is being loaded, or the connector asked for patience; others may go first."""
    NO_MEMORY = enum.auto()
    """It does not fit; nobody overtakes it."""


class Scheduler:
    """Continuous batching under a token budget.

    Lives on the engine's main thread.

    Args:
        settings: limits and policy.
        kv_cache: block tables.
        connector: the connector's scheduler half.
        eos_token_ids: tokens that end a request unless it ignores them.
        stats: counters to keep.
        clock: monotonic seconds.

    Attributes:
        transfers: KV on its way in or out.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        kv_cache: KVCacheManager,
        connector: KVConnectorScheduler,
        *,
        eos_token_ids: frozenset[int],
        stats: EngineStats,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._kv_cache = kv_cache
        self._connector = connector
        self._eos_token_ids = eos_token_ids
        self._stats = stats
        self._clock = clock

        self._requests: dict[str, Request] = {}
        self._waiting = RequestQueue(settings.policy)
        self._running = RequestQueue(settings.policy)
        self.transfers = KVTransfers(settings, kv_cache, connector, stats, clock)
        self._runner_view = RunnerView()
        self._is_stalled = False

    # --- requests come and go ---------------------------------------------------------------------------

    def add_request(self, request: Request) -> None:
        """Queue a request.

        Raises:
            OverloadedError: the queue is full.
        """
        if len(self._waiting) >= self._settings.max_queue_len:
            raise OverloadedError(
                f"the instance's queue is full ({self._settings.max_queue_len} requests wait); try again later"
            )
        assert not self.has_request(request.request_id), f"request id {request.request_id} is in use"
        self._requests[request.request_id] = request
        self._waiting.add(request)
        self.transfers.note_queued(request)
        self._is_stalled = False

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End these requests without output; unknown ids are ignored.

        One that has ended and whose KV waits for a consumer is given up: nobody will come for it.
        """
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._finish(request, FinishReason.ABORT)
            else:
                self.transfers.cancel_send(request_id)

    def fail_requests(self, request_ids: Iterable[str], error: WireError) -> list[RequestOutput]:
        """End these requests with an error."""
        outputs = []
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                outputs.append(self._finish(request, FinishReason.ERROR, error=error))
        return outputs

    def has_request(self, request_id: str) -> bool:
        """Whether the request lives here, or KV still moves under its name."""
        return request_id in self._requests or self.transfers.has(request_id)

    @property
    def live_request_ids(self) -> list[str]:
        """Requests that have not ended."""
        return list(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place or for KV."""
        return len(self._waiting) + self.transfers.num_loading

    @property
    def num_running(self) -> int:
        """Requests that compute."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether a step would probably compute tokens."""
        return bool(self._running or (self._waiting and not self._is_stalled))

    @property
    def has_transfers(self) -> bool:
        """Whether steps must go on, at an easy pace, though there may be nothing to compute.

        KV is on its way in or out; the runner is still to hear of an end; or the last step could start none of
        the waiting requests, because a connector asked for patience or memory is still held.
        """
        is_held_up = bool(self._waiting) and self._is_stalled
        return self.transfers.has_any or self._runner_view.has_news or is_held_up

    def count_used_slots(self) -> int:
        """Token slots that hold KV of running or waiting requests, for the waste metric."""
        return sum(r.num_computed_tokens for r in list(self._requests.values()) if self._holds_blocks(r))

    def get_holdings(self) -> list[BlockHolding]:
        """Who holds blocks now."""
        now_s = self._clock()
        purposes = {RequestStatus.RUNNING: "running", RequestStatus.WAITING: "waiting"}
        live = [
            BlockHolding(
                request.request_id,
                purposes.get(request.status, "loading"),
                now_s - request.admitted_s,
                list(self._kv_cache.get_block_ids(request.request_id)),
            )
            for request in self._requests.values()
            if self._holds_blocks(request)
        ]
        return live + self.transfers.get_holdings()

    # --- one step ---------------------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Decide the next step; nothing counts as computed until ``update_from_output``."""
        scheduled: dict[str, int] = {}
        preempted: list[str] = []
        budget = self._settings.max_num_batched_tokens
        budget = self._schedule_running(scheduled, preempted, budget)
        if not preempted:
            self._schedule_waiting(scheduled, budget)
        self._is_stalled = not scheduled
        return self._build_output(scheduled, preempted)

    def schedule_nothing(self) -> SchedulerOutput:
        """A step without tokens: transfers go on, and nothing else."""
        return self._build_output({}, [])

    def expire_requests(self) -> list[RequestOutput]:
        """End the requests whose deadline has passed."""
        now = self._clock()
        late = [r for r in self._requests.values() if r.deadline_s is not None and now >= r.deadline_s]
        error = WireError(
            code="request_timeout",
            message="the request's deadline passed before it finished",
            http_status=504,
        )
        return [self._finish(request, FinishReason.TIMEOUT, error=error) for request in late]

    def update_from_output(self, step: SchedulerOutput, result: ModelRunnerOutput) -> list[RequestOutput]:
        """Take in what the step computed and what the connector reports."""
        outputs = self._update_transfers(result.connector_output)
        invalid_block_ids = result.connector_output.invalid_block_ids
        sampled: list[Request] = []
        for item in step.scheduled:
            request = self._requests.get(item.request_id)
            if request is None:
                continue  # aborted or failed since
            if invalid_block_ids and self.transfers.rewind_invalid(request, invalid_block_ids):
                # Computed on blocks that a synchronous load did not fill; the runner may have a token of it.
                self._runner_view.drop(request.request_id)
                if self.transfers.fails_requests:
                    outputs.append(self._finish(request, FinishReason.ERROR, error=LOAD_FAILED))
                continue
            if item.request_id in result.failed:
                error = WireError(code="engine_error", message=result.failed[item.request_id], retryable=True)
                outputs.append(self._finish(request, FinishReason.ERROR, error=error))
                continue
            self._note_computed(request, item, result)
            token_id = result.sampled_token_ids.get(item.request_id)
            if token_id is not None:
                outputs.append(self._append_token(request, token_id, result))
                sampled.append(request)
        self._stats.observe_tokens(sampled, self._clock())
        return outputs

    # --- scheduling -------------------------------------------------------------------------------------

    def _schedule_running(self, scheduled: dict[str, int], preempted: list[str], budget: int) -> int:
        """Running requests first: each its missing tokens, taking blocks from the last one if need be."""
        index = 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            while not self._kv_cache.grow(request.request_id, request.num_computed_tokens + num_tokens):
                victim = self._running.pop_last()
                self._preempt(victim)
                preempted.append(victim.request_id)
                if victim is request:
                    return budget
            scheduled[request.request_id] = num_tokens
            budget -= num_tokens
            index += 1
        return budget

    def _schedule_waiting(self, scheduled: dict[str, int], budget: int) -> None:
        """Then waiting ones, in order, while there is budget, a place and memory."""
        for request in self._waiting:
            if budget <= 0 or len(self._running) + self.transfers.num_loading >= self._settings.max_num_seqs:
                return
            if not self._holds_blocks(request):
                admission = self._admit(request)
                if admission is Admission.NO_MEMORY:
                    return
                if admission is Admission.NOT_NOW:
                    continue
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            while not self._kv_cache.grow(request.request_id, request.num_computed_tokens + num_tokens):
                if not self._reclaim(keep=request):
                    return
            self._start(request)
            scheduled[request.request_id] = num_tokens
            budget -= num_tokens

    def _admit(self, request: Request) -> Admission:
        """Give a waiting request its blocks: prefix hits, and room for what a connector loads."""
        prefix = self._kv_cache.find_prefix(request)
        num_local = len(prefix) * self._kv_cache.block_size
        match = self.transfers.get_match(request, num_local)
        if match.num_tokens is None:
            return Admission.NOT_NOW
        # Admitting by the whole length, not by the first chunk, keeps prompts from preempting one another.
        while not self._kv_cache.can_admit(prefix, request.num_tokens):
            if not self._reclaim(keep=request):
                return Admission.NO_MEMORY
        self._kv_cache.admit(request.request_id, prefix, num_local + match.num_tokens)
        self._stats.count_lookup(request, num_local, match, self._kv_cache.block_size)
        request.note_admission(num_local, self._clock())
        if self.transfers.start_load(request, match):
            self._waiting.remove(request)
            return Admission.NOT_NOW
        return Admission.ADMITTED

    def _start(self, request: Request) -> None:
        self._waiting.remove(request)
        request.status = RequestStatus.RUNNING
        self._running.add(request)
        if request.first_scheduled_s is None:
            request.first_scheduled_s = self._clock()
            self._stats.queue_time.observe(request.first_scheduled_s - request.received_s)
            if request.num_computed_tokens < request.num_prompt_tokens:
                request.add_event("prefill_started", num_cached_tokens=request.num_computed_tokens)

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks; it computes its tokens again later, to the same values."""
        self._release_blocks(request)
        request.status = RequestStatus.WAITING
        request.add_event("preempted", num_tokens=request.num_tokens)
        self._stats.preemptions.inc()
        self._waiting.add(request)

    def _reclaim(self, *, keep: Request) -> bool:
        """Take the blocks of the last waiting request that holds some (its loaded KV is computed instead).

        Only when nothing else will give memory back: without this, requests with loaded KV could hold all of
        it while none of them can go on.
        """
        if self._running or self.transfers.has_any:
            return False
        for request in reversed(self._waiting):
            if request is not keep and self._holds_blocks(request):
                self._release_blocks(request)
                return True
        return False

    def _release_blocks(self, request: Request) -> None:
        self._kv_cache.free(request.request_id)
        request.note_released()
        self._runner_view.drop(request.request_id)

    def _build_output(self, scheduled: dict[str, int], preempted: list[str]) -> SchedulerOutput:
        new_requests: list[NewRequest] = []
        items: list[ScheduledRequest] = []
        plan: list[ScheduledTokens] = []
        for request_id, num_tokens in scheduled.items():
            request = self._requests[request_id]
            request.note_scheduled(num_tokens)
            block_ids = self._kv_cache.get_block_ids(request_id)
            new, item = self._runner_view.describe(request, block_ids, num_tokens)
            if new is not None:
                new_requests.append(new)
            items.append(item)
            plan.append(ScheduledTokens(request.kv, block_ids, request.num_computed_tokens, num_tokens))
        return SchedulerOutput(
            new_requests=tuple(new_requests),
            scheduled=tuple(items),
            dropped_request_ids=self._runner_view.take_dropped(),
            num_tokens=sum(scheduled.values()),
            connector_metadata=self._connector.build_connector_metadata(StepPlan(plan, preempted)),
            finished_sending_due=self.transfers.take_sending_due(),
            loads_started=self.transfers.take_loads_started(),
        )

    # --- results ----------------------------------------------------------------------------------------

    def _note_computed(self, request: Request, item: ScheduledRequest, result: ModelRunnerOutput) -> None:
        """The KV of a request's scheduled tokens stands in its blocks."""
        request.num_computed_tokens = item.num_computed_tokens + item.num_scheduled_tokens
        self._kv_cache.index_computed_blocks(request)
        if item.num_computed_tokens < request.num_prompt_tokens:
            request.note_chunk(item.num_computed_tokens, item.num_scheduled_tokens)
        if item.request_id in result.prompt_logprobs:
            request.prompt_logprobs.extend(result.prompt_logprobs[item.request_id])

    def _append_token(self, request: Request, token_id: int, result: ModelRunnerOutput) -> RequestOutput:
        """A request got a token, which may end it."""
        request.append_token(token_id)
        logprobs = result.logprobs.get(request.request_id)
        is_first = request.num_new_tokens == 1
        output = RequestOutput(
            request_id=request.request_id,
            new_token_ids=[token_id],
            logprobs=None if logprobs is None else [logprobs],
            prompt_logprobs=request.take_prompt_logprobs(),
            num_cached_tokens=request.num_cached_tokens if is_first else 0,
            num_external_tokens=request.num_external_tokens if is_first else 0,
            events=request.take_events(),
        )
        reason = request.find_finish_reason(self._eos_token_ids)
        if reason is None:
            return output
        end = self._finish(request, reason)
        if self.transfers.defer(end):
            return output  # the hand-off is announced when the KV is saved
        return _merge(output, end)

    def _update_transfers(self, output: ConnectorOutput) -> list[RequestOutput]:
        """Loads that ended put requests back into the queue; sends that ended free blocks and announce KV."""
        update = self.transfers.update(output)
        for request in update.loaded:
            self._waiting.add(request)
            self._is_stalled = False
        failed = [self._finish(r, FinishReason.ERROR, error=LOAD_FAILED) for r in update.failed]
        return [*update.announced, *failed]

    def _finish(self, request: Request, reason: FinishReason, *, error: WireError | None = None) -> RequestOutput:
        """End a request from any state; its blocks go back, or stay with a transfer until that ends."""
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        elif request.status is RequestStatus.WAITING:
            self._waiting.remove(request)
        del self._requests[request.request_id]
        self._runner_view.drop(request.request_id)
        params = self.transfers.finish(request, reason)
        request.status = RequestStatus.FINISHED
        self._stats.count_finished(request, reason, self._clock())
        return RequestOutput(
            request_id=request.request_id,
            finish_reason=reason,
            stop_token_id=request.get_stop_token_id(reason, self._eos_token_ids),
            error=error,
            kv_transfer_params=params,
            events=request.take_events(),
        )

    def _holds_blocks(self, request: Request) -> bool:
        return bool(self._kv_cache.get_block_ids(request.request_id))


def _merge(output: RequestOutput, end: RequestOutput) -> RequestOutput:
    """The request's last token and its end in one message."""
    return msgspec.structs.replace(
        output,
        finish_reason=end.finish_reason,
        stop_token_id=end.stop_token_id,
        kv_transfer_params=end.kv_transfer_params,
        events=[*output.events, *end.events],
    )
