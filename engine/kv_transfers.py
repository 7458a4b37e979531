"""KV on its way in or out of an engine, as the scheduler sees it.

Owns the connector's scheduler half, the requests whose KV is being loaded, and the finished requests whose KV
is being sent. Every transfer that starts ends here exactly once: late, duplicate and unknown reports change
nothing and are counted.

Who owns a block: a loading request's blocks belong to the load until its end is reported, also when the request
was aborted in between; a held request's blocks belong to the connector until it reports them sent.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from pdserve.connectors.base import (
    CancelsSends,
    ConnectorOutput,
    HearsOfQueue,
    KVConnectorScheduler,
    MatchResult,
)
from pdserve.engine.block_accounting import BlockHolding
from pdserve.engine.config import SchedulerSettings
from pdserve.engine.kv_cache_manager import KVCacheManager
from pdserve.engine.metrics import EngineStats
from pdserve.engine.request import Request, RequestStatus
from pdserve.errors import ConnectorError
from pdserve.protocol import FinishReason, KVTransferParams, RequestOutput, WireError

logger = logging.getLogger(__name__)

NO_MATCH = MatchResult(0)
LOAD_FAILED = WireError(
    code="kv_transfer_failed",
    message="the prompt's KV could not be loaded, and kv_load_failure_policy is 'fail'",
    retryable=True,
)


@dataclass(slots=True)
class _Load:
    """A load under way; ``orphan_block_ids`` is set when its request was aborted."""

    request: Request
    num_tokens: int
    started_s: float
    orphan_block_ids: list[int] | None = None


@dataclass(slots=True)
class _Send:
    """A send under way; ``announcement`` goes to the router when it ends."""

    request: Request
    held_block_ids: list[int]
    started_s: float
    announcement: RequestOutput | None = None
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class TransferUpdate:
    """What a step's report changes for the scheduler.

    Attributes:
        loaded: requests that can be scheduled now; how much KV they got shows in ``num_computed_tokens``.
        failed: requests to end with an error (policy ``fail``).
        announced: last outputs of hand-offs whose KV can be fetched now.
    """

    loaded: list[Request] = field(default_factory=list)
    failed: list[Request] = field(default_factory=list)
    announced: list[RequestOutput] = field(default_factory=list)


class KVTransfers:
    """Bookkeeping of loads and sends.

    Args:
        settings: for ``kv_load_failure_policy``.
        kv_cache: block tables.
        connector: the connector's scheduler half.
        stats: counters.
        clock: monotonic seconds.

    Attributes:
        fails_requests: a load that fails ends its request, instead of being made good by computing.
    """

    def __init__(
        self,
        settings: SchedulerSettings,
        kv_cache: KVCacheManager,
        connector: KVConnectorScheduler,
        stats: EngineStats,
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self.fails_requests = settings.kv_load_failure_policy == "fail"
        self._kv_cache = kv_cache
        self._connector = connector
        self._stats = stats
        self._loads: dict[str, _Load] = {}
        self._sends: dict[str, _Send] = {}
        self._sending_due: list[str] = []
        self._loads_started: list[str] = []

    @property
    def num_loading(self) -> int:
        """Live requests that wait for a load."""
        return sum(load.orphan_block_ids is None for load in list(self._loads.values()))

    @property
    def has_any(self) -> bool:
        """Whether a report is still to come."""
        return bool(self._loads or self._sends)

    def has(self, request_id: str) -> bool:
        """Whether a report on this request is still to come."""
        return request_id in self._loads or request_id in self._sends

    @property
    def has_unannounced(self) -> bool:
        """Whether hand-offs wait for their KV to be saved."""
        return any(send.announcement is not None for send in self._sends.values())

    # --- loads ------------------------------------------------------------------------------------------

    def note_queued(self, request: Request) -> None:
        """The request waits for its turn; KV that is lent to it elsewhere is to be kept until then."""
        if request.kv.kv_transfer_params is not None and isinstance(self._connector, HearsOfQueue):
            self._connector.request_queued(request.kv)

    def get_match(self, request: Request, num_local_tokens: int) -> MatchResult:
        """What the connector can load beyond the local hits, of the prompt, less a token that must be computed here."""
        if request.wants_prompt_logprobs:
            return NO_MATCH
        try:
            match = self._connector.get_num_new_matched_tokens(request.kv, num_local_tokens)
        except (ConnectorError, OSError) as error:
            logger.warning("KV lookup failed, the prompt is computed instead: %s", error)
            self._stats.transfers.count_failure("lookup")
            return NO_MATCH
        if not match.num_tokens:
            return match
        num_usable = min(request.num_tokens - 1, request.num_prompt_tokens) - num_local_tokens
        num_tokens = min(match.num_tokens, num_usable)
        return dataclasses.replace(match, num_tokens=num_tokens) if num_tokens > 0 else NO_MATCH

    def start_load(self, request: Request, match: MatchResult) -> bool:
        """Tell the connector of the request's blocks; True when a load is under way and it must wait."""
        num_tokens = match.num_tokens or 0
        block_ids = self._kv_cache.get_block_ids(request.request_id)
        self._connector.update_state_after_alloc(request.kv, block_ids, request.num_computed_tokens, num_tokens)
        request.spend_transfer_params()
        if num_tokens == 0:
            return False
        request.add_event("kv_load_started", num_tokens=num_tokens)
        if not match.is_async:
            request.note_loaded(num_tokens)
            return False
        request.status = RequestStatus.WAITING_FOR_REMOTE_KV
        self._loads[request.request_id] = _Load(request, num_tokens, self._clock())
        self._loads_started.append(request.request_id)
        return True

    def take_loads_started(self) -> tuple[str, ...]:
        """Requests whose asynchronous load began since the last call."""
        started, self._loads_started = tuple(self._loads_started), []
        return started

    def rewind_invalid(self, request: Request, invalid_block_ids: set[int]) -> bool:
        """Undo what was computed on blocks that a synchronous load left unfilled."""
        if not invalid_block_ids:
            return False
        for i, block_id in enumerate(self._kv_cache.get_block_ids(request.request_id)):
            if block_id in invalid_block_ids:
                request.note_lost(i * self._kv_cache.block_size)
                request.add_event("kv_load_failed")
                return True
        return False

    def _end_load(self, load: _Load, num_good_tokens: int, num_bytes: int, update: TransferUpdate) -> None:
        request = load.request
        if load.orphan_block_ids is not None:
            self._kv_cache.pool.free(load.orphan_block_ids)
            return
        num_good_tokens = min(max(num_good_tokens, 0), load.num_tokens)
        whole = num_good_tokens == load.num_tokens
        if not whole and self.fails_requests:
            update.failed.append(request)
            return
        if not whole:
            # Only whole blocks count, so that what is computed next starts a block of its own.
            size = self._kv_cache.block_size
            end = (request.num_computed_tokens + num_good_tokens) // size * size
            num_good_tokens = max(end - request.num_computed_tokens, 0)
            request.add_event("kv_load_failed", num_tokens=load.num_tokens - num_good_tokens)
        if num_good_tokens:
            request.note_loaded(num_good_tokens)
            request.add_event("kv_loaded", num_tokens=num_good_tokens, num_bytes=num_bytes)
            self._kv_cache.index_computed_blocks(request)
        request.status = RequestStatus.WAITING
        update.loaded.append(request)

    # --- sends ------------------------------------------------------------------------------------------

    def finish(self, request: Request, reason: FinishReason) -> KVTransferParams | None:
        """The request ends: free its blocks, or leave them with the transfer that needs them."""
        request_id = request.request_id
        block_ids = self._kv_cache.get_block_ids(request_id)
        decision = self._connector.request_finished(
            request.kv, block_ids, request.num_computed_tokens, handoff=reason is FinishReason.HANDOFF
        )
        load = self._loads.get(request_id)
        if load is not None:
            load.orphan_block_ids = self._kv_cache.detach(request_id)
        held = self._kv_cache.detach(request_id) if decision.hold_blocks else []
        if decision.expects_sent:
            self._sends[request_id] = _Send(request, held, self._clock())
            self._sending_due.append(request_id)
        self._kv_cache.free(request_id)
        if reason is not FinishReason.HANDOFF:
            request.add_event("finished")
        elif decision.kv_transfer_params is not None and not decision.announce_when_sent:
            request.add_event("kv_saved", num_tokens=decision.kv_transfer_params.num_tokens)
        if decision.announce_when_sent and reason is FinishReason.HANDOFF:
            self._sends[request_id].announcement = RequestOutput(request_id=request_id)
        return decision.kv_transfer_params if reason is FinishReason.HANDOFF else None

    def cancel_send(self, request_id: str) -> None:
        """No consumer will come for what this ended request holds; unknown ids are ignored."""
        send = self._sends.get(request_id)
        if send is None or send.is_cancelled:
            return
        send.is_cancelled, send.announcement = True, None
        if isinstance(self._connector, CancelsSends):
            self._connector.cancel_send(request_id)

    def defer(self, end: RequestOutput) -> bool:
        """Keep a hand-off's last output until its KV is saved; False when it can go out now."""
        send = self._sends.get(end.request_id)
        if send is None or send.announcement is None:
            return False
        send.announcement = end
        return True

    def take_sending_due(self) -> tuple[str, ...]:
        """Requests finished since the last call whose sending the workers will report."""
        due, self._sending_due = tuple(self._sending_due), []
        return due

    def _end_send(self, send: _Send, *, failed: bool, num_bytes: int) -> RequestOutput | None:
        self._kv_cache.pool.free(send.held_block_ids)
        end = send.announcement
        if end is None:
            return None
        if failed:
            return msgspec.structs.replace(end, kv_transfer_params=None)
        num_tokens = end.kv_transfer_params.num_tokens if end.kv_transfer_params else 0
        send.request.add_event("kv_saved", num_tokens=num_tokens, num_bytes=num_bytes)
        return msgspec.structs.replace(end, events=[*end.events, *send.request.take_events()])

    # --- reports ----------------------------------------------------------------------------------------

    def update(self, output: ConnectorOutput) -> TransferUpdate:
        """Take in a step's report."""
        self._connector.update_from_output(output)
        self._stats.transfers.count(output)
        update = TransferUpdate()
        for request_id in output.finished_receiving | output.failed_receiving.keys():
            load = self._loads.pop(request_id, None)
            if load is None:
                self._reject("receiving", request_id)
                continue
            num_good = output.failed_receiving.get(request_id, load.num_tokens)
            self._end_load(load, num_good, output.received_bytes.get(request_id, 0), update)
        for request_id in output.finished_sending | output.failed_sending:
            send = self._sends.pop(request_id, None)
            if send is None:
                self._reject("sending", request_id)
                continue
            announced = self._end_send(
                send,
                failed=request_id in output.failed_sending,
                num_bytes=output.sent_bytes.get(request_id, 0),
            )
            if announced is not None:
                update.announced.append(announced)
        return update

    def get_holdings(self) -> list[BlockHolding]:
        """Blocks that transfers hold for requests that have ended."""
        now_s = self._clock()
        loads = [
            BlockHolding(request_id, "orphaned_load", now_s - load.started_s, load.orphan_block_ids)
            for request_id, load in self._loads.items()
            if load.orphan_block_ids
        ]
        sends = [
            BlockHolding(request_id, "sending", now_s - send.started_s, send.held_block_ids)
            for request_id, send in self._sends.items()
            if send.held_block_ids
        ]
        return loads + sends

    def update_metrics(self) -> None:
        """Set what the metrics tell of now."""
        self._stats.transfers.set_running(
            num_loads=len(self._loads),
            num_saves=len(self._sends),
            num_leases=sum(bool(send.held_block_ids) for send in self._sends.values()),
        )

    def count_overdue(self, max_age_s: float) -> int:
        """Transfers that have been under way for longer than ``max_age_s``."""
        latest_start_s = self._clock() - max_age_s
        starts_s = [load.started_s for load in self._loads.values()] + [s.started_s for s in self._sends.values()]
        return sum(started_s < latest_start_s for started_s in starts_s)

    def _reject(self, direction: str, request_id: str) -> None:
        logger.warning("late or unknown %s report for request %s is ignored", direction, request_id)
        self._stats.transfers.count_failure("late_report")
