"""The half beside the scheduler, for any store: what it holds for a request, and what each step loads and saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pdserve.connectors.base import (
    ConnectorContext,
    ConnectorOutput,
    FinishDecision,
    KVRequest,
    MatchResult,
    ScheduledTokens,
    StepPlan,
    WakesEngine,
)
from pdserve.connectors.blocks.messages import LoadRequest, SaveRequest, StepMetadata, pair_blocks
from pdserve.connectors.blocks.store import BlockIndex
from pdserve.protocol import KVTransferParams


class StoreScheduler:
    """Lives on the engine's main thread.

    Args:
        connector: the connector's name.
        context: the engine.
        index: tells what is stored.
        saves: whether this engine saves.
    """

    def __init__(self, connector: str, context: ConnectorContext, index: BlockIndex, *, saves: bool) -> None:
        self._connector = connector
        self._context = context
        self._index = index
        self._saves = saves
        self._block_size = context.spec.block_size
        self._num_saved_blocks: dict[str, int] = {}
        self._loading: set[str] = set()
        self._failed_loads: set[str] = set()
        self._loads: list[LoadRequest] = []
        self._forgotten: list[str] = []

    def set_wake_up(self, wake: Callable[[], None]) -> None:
        """For an index that has to ask first: called when it has an answer."""
        if isinstance(self._index, WakesEngine):
            self._index.set_wake_up(wake)

    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> MatchResult:
        """Tokens of the longest run of stored blocks that starts at ``num_computed_tokens``.

        Blocks are loaded whole, so a count inside a block is answered with 0: a load would write to a block whose
        first tokens the engine already has, and may share. The same for a request whose load has failed: what
        could not be read once is computed, instead of being promised again.
        """
        start, offset = divmod(num_computed_tokens, self._block_size)
        if offset or request.request_id in self._failed_loads:
            return MatchResult(0)
        num_blocks = self._index.count_stored_run(request, start)
        if num_blocks is None:
            return MatchResult(None)
        num_tokens = sum(key.num_tokens for key in request.block_keys[start : start + num_blocks])
        return MatchResult(num_tokens, is_async=num_tokens > 0)

    def update_state_after_alloc(
        self,
        request: KVRequest,
        block_ids: Sequence[int],
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        """Note the load for the step's message."""
        self._index.forget(request.request_id)
        if num_external_tokens > 0:
            start = num_computed_tokens // self._block_size
            end = self._context.spec.num_blocks_for(num_computed_tokens + num_external_tokens)
            blocks = pair_blocks(request, block_ids, start, end)
            self._loads.append(LoadRequest(request.request_id, num_external_tokens, blocks))
            self._loading.add(request.request_id)

    def build_connector_metadata(self, plan: StepPlan) -> StepMetadata:
        """Loads noted since the last step, and the prompt blocks that this step completes."""
        for request_id in plan.preempted_request_ids:
            if request_id in self._num_saved_blocks:
                self._num_saved_blocks[request_id] = 0  # what the store lost meanwhile is saved again
        saves = self._build_saves(plan.scheduled)
        metadata = StepMetadata(self._loads, saves, self._forgotten, has_tokens=bool(plan.scheduled))
        self._loads, self._forgotten = [], []
        return metadata

    def update_from_output(self, output: ConnectorOutput) -> None:
        """Remember whose load failed, unless the request has ended meanwhile."""
        self._failed_loads.update(self._loading.intersection(output.failed_receiving))
        self._loading.difference_update(output.failed_receiving, output.finished_receiving)

    def request_finished(
        self, request: KVRequest, block_ids: Sequence[int], num_computed_tokens: int, *, handoff: bool
    ) -> FinishDecision:
        """Offer a hand-off's KV once its writes have ended; the blocks are free at once."""
        request_id = request.request_id
        self._index.forget(request_id)
        self._loading.discard(request_id)  # its load goes on and is reported: the engine keeps the blocks so long
        self._failed_loads.discard(request_id)
        has_saves = self._num_saved_blocks.pop(request_id, None) is not None
        if has_saves and handoff:
            return FinishDecision(kv_transfer_params=self._build_params(request), announce_when_sent=True)
        if has_saves:
            self._forgotten.append(request_id)
        return FinishDecision()

    def close(self) -> None:
        """Let go of the index."""
        self._index.close()

    def _build_saves(self, scheduled: Iterable[ScheduledTokens]) -> list[SaveRequest]:
        """Every prompt block that stands in memory after the step and was not handed to the workers before.

        Prefix hits and loaded blocks are handed over too: the store may have evicted them since, and a decode
        engine needs the whole prompt. The workers skip what is stored.
        """
        if not self._saves:
            return []
        saves = []
        for item in scheduled:
            request_id = item.request.request_id
            start = self._num_saved_blocks.get(request_id, 0)
            end = self._count_complete_blocks(item)
            if start < end:
                blocks = pair_blocks(item.request, item.block_ids, start, end)
                saves.append(SaveRequest(request_id, blocks))
                self._num_saved_blocks[request_id] = end
        return saves

    def _count_complete_blocks(self, item: ScheduledTokens) -> int:
        """Prompt blocks that are whole after the step; the partial last one is when the whole prompt is."""
        num_tokens = item.num_computed_tokens + item.num_scheduled_tokens
        if num_tokens >= item.request.num_prompt_tokens:
            return len(item.request.block_keys)
        return num_tokens // self._block_size

    def _build_params(self, request: KVRequest) -> KVTransferParams:
        return KVTransferParams(
            connector=self._connector,
            transfer_id=f"{self._context.engine_id}:{request.request_id}",
            engine_id=self._context.engine_id,
            num_tokens=request.num_prompt_tokens,
            num_bytes=len(request.block_keys) * self._context.identity.kv.block_bytes,
        )
