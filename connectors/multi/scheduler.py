"""The half beside the scheduler: asks the children in order, and tells each what it would hear alone."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence

from pdserve.connectors.base import (
    ConnectorContext,
    ConnectorOutput,
    FinishDecision,
    KVConnectorScheduler,
    KVRequest,
    MatchResult,
    ScheduledTokens,
    StepPlan,
)
from pdserve.connectors.blocks.failures import WarningLimiter
from pdserve.connectors.multi.children import Child
from pdserve.connectors.multi.messages import ChildMessage, MultiMetadata, OwedSend, OwnedLoad
from pdserve.connectors.multi.params import compose_params, view_for
from pdserve.errors import ConnectorError

logger = logging.getLogger(__name__)


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
        self._promised_by: dict[str, int] = {}
        self._loading_by: dict[str, int] = {}
        self._sent_by: dict[str, tuple[int, ...]] = {}
        self._loads: list[OwnedLoad] = []
        self._sends: list[OwedSend] = []

    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> MatchResult:
        """The answer of the first child that has all the rest of the prompt, else of the first that has most.

        A hand-off may arrive while a store still writes: taking what the first child happens to have would waste
        what another has whole. A child that asks for patience is waited for; those behind it are asked all the same,
        so that their own lookups go on meanwhile. Only who promised last is remembered, for the load.
        """
        self._promised_by.pop(request.request_id, None)
        best, promised_by, is_waiting = MatchResult(0), 0, False
        for index, child in enumerate(self._children):
            match = self._ask(index, view_for(request, child), num_computed_tokens)
            if match.num_tokens is None:
                is_waiting = True
            elif match.num_tokens > (best.num_tokens or 0):
                best, promised_by = match, index
                if not is_waiting and num_computed_tokens + match.num_tokens >= request.num_prompt_tokens:
                    break
        if is_waiting:
            return MatchResult(None)
        if best.num_tokens:
            self._promised_by[request.request_id] = promised_by
        return best

    def update_state_after_alloc(
        self,
        request: KVRequest,
        block_ids: Sequence[int],
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        """The child that promised the tokens loads them; the others hear of 0."""
        chosen = self._promised_by.pop(request.request_id, 0)
        if num_external_tokens > 0:
            self._loading_by[request.request_id] = chosen
            self._loads.append(OwnedLoad(request.request_id, chosen))
        for index, (child, half) in enumerate(zip(self._children, self._halves, strict=True)):
            num_tokens = num_external_tokens if index == chosen else 0
            half.update_state_after_alloc(view_for(request, child), block_ids, num_computed_tokens, num_tokens)

    def build_connector_metadata(self, plan: StepPlan) -> MultiMetadata:
        """Every child's message, and who owes what."""
        parts = [
            half.build_connector_metadata(_view_plan(plan, child))
            for child, half in zip(self._children, self._halves, strict=True)
        ]
        metadata = MultiMetadata(parts, self._loads, self._sends)
        self._loads, self._sends = [], []
        return metadata

    def update_from_output(self, output: ConnectorOutput) -> None:
        """Each child hears of its own transfers."""
        for index, half in enumerate(self._halves):
            half.update_from_output(self._select(output, index))
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
        self._promised_by.pop(request_id, None)
        decisions = [
            half.request_finished(view_for(request, child), block_ids, num_computed_tokens, handoff=handoff)
            for child, half in zip(self._children, self._halves, strict=True)
        ]
        decision = self._join(request_id, decisions)
        owed = tuple(index for index, own in enumerate(decisions) if own.expects_sent)
        if owed:
            self._sends.append(OwedSend(request_id, owed, decision.expects_sent))
        if decision.expects_sent:
            self._sent_by[request_id] = owed
        return decision

    def close(self) -> None:
        """Close every child, whatever another one does."""
        with contextlib.ExitStack() as stack:
            for half in self._halves:
                stack.callback(half.close)

    def _ask(self, index: int, request: KVRequest, num_computed_tokens: int) -> MatchResult:
        try:
            return self._halves[index].get_num_new_matched_tokens(request, num_computed_tokens)
        except (ConnectorError, OSError) as error:
            name = self._children[index].name
            self._warnings.warn(name, f"connector {name} cannot look up KV: {error}; the others are asked")
            return MatchResult(0)

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

        def is_sent(request_id: str) -> bool:
            return index in self._sent_by.get(request_id, ())

        return ConnectorOutput(
            finished_sending=set(filter(is_sent, output.finished_sending)),
            failed_sending=set(filter(is_sent, output.failed_sending)),
            finished_receiving=set(filter(is_loaded, output.finished_receiving)),
            failed_receiving={i: good for i, good in output.failed_receiving.items() if is_loaded(i)},
            invalid_block_ids=set(output.invalid_block_ids),
            received_bytes=_keep(output.received_bytes, set(filter(is_loaded, output.received_bytes))),
            sent_bytes=_keep(output.sent_bytes, set(filter(is_sent, output.sent_bytes))),
            messages=[
                said.message for said in output.messages if isinstance(said, ChildMessage) and said.child == index
            ],
        )


def _keep(counts: Mapping[str, int], request_ids: set[str]) -> dict[str, int]:
    return {request_id: counts[request_id] for request_id in request_ids}


def _view_plan(plan: StepPlan, child: Child) -> StepPlan:
    if all(item.request.kv_transfer_params is None for item in plan.scheduled):
        return plan
    scheduled: list[ScheduledTokens] = [
        dataclasses.replace(item, request=view_for(item.request, child)) for item in plan.scheduled
    ]
    return dataclasses.replace(plan, scheduled=scheduled)
