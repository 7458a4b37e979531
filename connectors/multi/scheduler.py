"""The half beside the scheduler: asks the children in order, and tells each what it would hear alone."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.connectors.base import (
    CancelsSends,
    ConnectorContext,
    ConnectorMetadata,
    ConnectorOutput,
    FinishDecision,
    HearsOfQueue,
    KVConnectorScheduler,
    KVRequest,
    MatchResult,
    ScheduledTokens,
    StepPlan,
    WakesEngine,
)
from pdserve.connectors.blocks.failures import WarningLimiter
from pdserve.connectors.multi.children import Child
from pdserve.connectors.multi.messages import MultiMetadata, MultiReport, OwedSend, OwnedLoad
from pdserve.connectors.multi.params import compose_params, view_for
from pdserve.connectors.output_aggregator import OutputAggregator
from pdserve.errors import ConnectorError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Promise:
    """Who has promised tokens, and how it loads them."""

    child: int
    is_async: bool


_UNPROMISED = _Promise(0, is_async=True)
"""Tokens that nobody promised: the first child reports that it cannot load them."""


class MultiScheduler:
    """Lives on the engine's main thread.

    Args:
        context: the engine.
        children: in order of preference.
        halves: their scheduler halves, in the same order.
    """

    def __init__(
        self, context: ConnectorContext, children: Sequence[Child], halves: Sequence[KVConnectorScheduler]
    ) -> None:
        self._context = context
        self._children = children
        self._halves = halves
        self._warnings = WarningLimiter(logger, time.monotonic)
        self._promises: dict[str, dict[int, _Promise]] = {}
        self._loading_by: dict[str, int] = {}
        self._failed_by: dict[str, set[int]] = {}
        self._sent_by: dict[str, tuple[int, ...]] = {}
        self._num_ranks = context.rank.size
        self._aggregators = [OutputAggregator(self._num_ranks) for _ in children]
        self._loads: list[OwnedLoad] = []
        self._sends: list[OwedSend] = []

    def request_queued(self, request: KVRequest) -> None:
        """Told to the children that hear of it and have a part in the request's parameters."""
        for child, half in zip(self._children, self._halves, strict=True):
            view = view_for(request, child)
            if view.kv_transfer_params is not None and isinstance(half, HearsOfQueue):
                half.request_queued(view)

    def set_wake_up(self, wake: Callable[[], None]) -> None:
        """Passed on to the children that can use it."""
        for half in self._halves:
            if isinstance(half, WakesEngine):
                half.set_wake_up(wake)

    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> MatchResult:
        """The answer of the first child that has all the rest of the prompt, else of the first that has most.

        A hand-off may arrive while a store still writes: taking what the first child happens to have would waste
        what another has whole. A child that asks for patience is waited for; those behind it are asked all the same,
        so that their own lookups go on meanwhile. One whose load has failed for this request is passed over. All
        that is remembered is who promised, for each number of computed tokens, because that child is to load.
        """
        best, promised_by, is_waiting = MatchResult(0), 0, False
        for index in self._list_candidates(request.request_id):
            match = self._ask(index, view_for(request, self._children[index]), num_computed_tokens)
            if match.num_tokens is None:
                is_waiting = True
            elif match.num_tokens > (best.num_tokens or 0):
                best, promised_by = self._name_part(index, match), index
                if not is_waiting and num_computed_tokens + match.num_tokens >= request.num_prompt_tokens:
                    break
        if is_waiting:
            return MatchResult(None)
        if best.num_tokens:
            promises = self._promises.setdefault(request.request_id, {})
            promises[num_computed_tokens] = _Promise(promised_by, best.is_async)
        return best

    def update_state_after_alloc(
        self,
        request: KVRequest,
        block_ids: Sequence[int],
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        """The child that promised the tokens loads them; the others hear of 0."""
        request_id = request.request_id
        promise = self._promises.pop(request_id, {}).get(num_computed_tokens, _UNPROMISED)
        if num_external_tokens > 0 and promise.is_async:
            self._failed_by.setdefault(request_id, set())
            self._loading_by[request_id] = promise.child
            self._loads.append(OwnedLoad(request_id, promise.child))
        for index, (child, half) in enumerate(zip(self._children, self._halves, strict=True)):
            num_tokens = num_external_tokens if index == promise.child else 0
            half.update_state_after_alloc(view_for(request, child), block_ids, num_computed_tokens, num_tokens)

    def build_connector_metadata(self, plan: StepPlan) -> MultiMetadata[tuple[ConnectorMetadata, ...]]:
        """Every child's message, and who owes what."""
        parts = tuple(
            half.build_connector_metadata(_view_plan(plan, child))
            for child, half in zip(self._children, self._halves, strict=True)
        )
        metadata = MultiMetadata(parts, self._loads, self._sends)
        self._loads, self._sends = [], []
        return metadata

    def update_from_output(self, output: ConnectorOutput) -> None:
        """Each child hears of its own transfers, and of each sending what became of it in that child."""
        for index, half in enumerate(self._halves):
            half.update_from_output(self._select(output, index))
        for request_id in output.failed_receiving:
            child, failed = self._loading_by.get(request_id), self._failed_by.get(request_id)
            if child is not None and failed is not None:
                failed.add(child)
        for request_id in (*output.finished_receiving, *output.failed_receiving):
            self._loading_by.pop(request_id, None)
        for request_id in output.finished_sending | output.failed_sending:
            self._sent_by.pop(request_id, None)

    def request_finished(
        self, request: KVRequest, block_ids: Sequence[int], num_computed_tokens: int, *, handoff: bool
    ) -> FinishDecision:
        """Ask every child, and answer for all.

        ::

            some child holds the blocks               -> held until all that will report a sending have
            parameters good at once, no child holds   -> they go out, and nobody waits for the others' sending
            all parameters are announced when sent    -> announced when all have sent
        """
        request_id = request.request_id
        self._promises.pop(request_id, None)
        self._failed_by.pop(request_id, None)
        decisions = [
            half.request_finished(view_for(request, child), block_ids, num_computed_tokens, handoff=handoff)
            for child, half in zip(self._children, self._halves, strict=True)
        ]
        decision = self._join(request_id, decisions)
        owed = tuple(index for index, own in enumerate(decisions) if own.expects_sent)
        for index in owed:
            self._aggregators[index].expect((), [request_id])
        if owed:
            self._sends.append(OwedSend(request_id, owed, decision.expects_sent))
        if decision.expects_sent:
            self._sent_by[request_id] = owed
        return decision

    def cancel_send(self, request_id: str) -> None:
        """Told to the children that hold blocks for a consumer and can give them up; stores have copies and go on."""
        for index in self._sent_by.get(request_id, ()):
            half = self._halves[index]
            if isinstance(half, CancelsSends):
                half.cancel_send(request_id)

    def close(self) -> None:
        """Close every child, whatever another one does. Idempotent."""
        with contextlib.ExitStack() as stack:
            for half in self._halves:
                stack.callback(half.close)

    def _list_candidates(self, request_id: str) -> list[int]:
        """Children that may load for the request, in order."""
        failed = self._failed_by.get(request_id, ())
        return [index for index in range(len(self._children)) if index not in failed]

    def _ask(self, index: int, request: KVRequest, num_computed_tokens: int) -> MatchResult:
        try:
            return self._halves[index].get_num_new_matched_tokens(request, num_computed_tokens)
        except (ConnectorError, OSError) as error:
            name = self._children[index].name
            self._warnings.warn(name, f"connector {name} cannot look up KV: {error}; the others are asked")
            return MatchResult(0)

    def _name_part(self, index: int, match: MatchResult) -> MatchResult:
        name = self._children[index].name
        return dataclasses.replace(match, part=f"{name}/{match.part}" if match.part else name)

    def _join(self, request_id: str, decisions: Sequence[FinishDecision]) -> FinishDecision:
        parts = {
            child.name: decision.kv_transfer_params
            for child, decision in zip(self._children, decisions, strict=True)
            if decision.kv_transfer_params is not None
        }
        transfer_id = f"{self._context.engine_id}:{request_id}"
        params = compose_params(transfer_id, self._context.engine_id, parts)
        is_good_now = any(d.kv_transfer_params is not None and not d.announce_when_sent for d in decisions)
        announces = any(d.announce_when_sent for d in decisions)
        return FinishDecision(
            hold_blocks=any(d.hold_blocks for d in decisions),
            kv_transfer_params=params,
            announce_when_sent=announces and not is_good_now,
        )

    def _select(self, output: ConnectorOutput, index: int) -> ConnectorOutput:
        """What of the joint report is the child's."""

        def is_loaded(request_id: str) -> bool:
            return self._loading_by.get(request_id) == index

        own = self._merge_ranks(output.messages, index)
        own.finished_receiving = set(filter(is_loaded, output.finished_receiving))
        own.failed_receiving = _keep(output.failed_receiving, is_loaded)
        own.invalid_block_ids = set(output.invalid_block_ids)
        own.received_bytes = _keep(output.received_bytes, is_loaded)
        return own

    def _merge_ranks(self, reports: Sequence[MultiReport[Sequence[list[Any]]]], index: int) -> ConnectorOutput:
        """What the child's worker halves said, and its sendings that ended in all ranks."""
        outputs = [ConnectorOutput() for _ in range(self._num_ranks)]
        for report in reports:
            output = outputs[report.rank]
            output.messages += report.said[index]
            for sent in report.sent:
                if sent.child == index:
                    output.finished_sending.add(sent.request_id)
                    output.sent_bytes[sent.request_id] = sent.num_bytes
                    if not sent.is_saved:
                        output.failed_sending.add(sent.request_id)
        return self._aggregators[index].merge(outputs)


def _keep(counts: Mapping[str, int], is_own: Callable[[str], bool]) -> dict[str, int]:
    return {request_id: count for request_id, count in counts.items() if is_own(request_id)}


def _view_plan(plan: StepPlan, child: Child) -> StepPlan:
    if all(item.request.kv_transfer_params is None for item in plan.scheduled):
        return plan
    scheduled: list[ScheduledTokens] = [
        dataclasses.replace(item, request=view_for(item.request, child)) for item in plan.scheduled
    ]
    return dataclasses.replace(plan, scheduled=scheduled)
