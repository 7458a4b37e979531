"""A direct connector in miniature: the consumer reads the producer's blocks, which are held until it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pdserve.connectors.base import (
    ConnectorContext,
    ConnectorFeatures,
    ConnectorOutput,
    FinishDecision,
    KVRequest,
    MatchResult,
    StepPlan,
)
from pdserve.connectors.blocks.block_memory import BlockMemory
from pdserve.connectors.null import NullScheduler, NullWorker
from pdserve.protocol import KVTransferParams


@dataclass
class World:
    """What all engines of a test share, and what the test does to it."""

    memories: dict[str, BlockMemory] = field(default_factory=dict)
    fetched: set[str] = field(default_factory=set)
    is_patient: bool = True
    is_broken: bool = False
    is_async: bool = True
    seen_params: list[KVTransferParams | None] = field(default_factory=list)
    counts_after_alloc: list[int] = field(default_factory=list)
    heard_by_scheduler: list[ConnectorOutput] = field(default_factory=list)
    layer_calls: list[tuple[str, int]] = field(default_factory=list)
    queued: list[KVRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    wake_ups: list[Callable[[], None]] = field(default_factory=list)
    num_closed: int = 0


class DirectScheduler(NullScheduler):
    def __init__(self, context: ConnectorContext, world: World) -> None:
        self._context = context
        self._world = world
        self._loads: list[tuple[str, int, list[int], dict[str, Any]]] = []

    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> MatchResult:
        self._world.seen_params.append(request.kv_transfer_params)
        if not self._world.is_patient:
            return MatchResult(None)
        if request.kv_transfer_params is None or num_computed_tokens:
            return MatchResult(0)
        return MatchResult(request.kv_transfer_params.num_tokens, is_async=self._world.is_async)

    def request_queued(self, request: KVRequest) -> None:
        self._world.queued.append(request)

    def cancel_send(self, request_id: str) -> None:
        self._world.cancelled.append(request_id)
        self._world.fetched.add(f"{self._context.engine_id}/{request_id}")

    def update_state_after_alloc(
        self, request: KVRequest, block_ids: Sequence[int], num_computed_tokens: int, num_external_tokens: int
    ) -> None:
        self._world.counts_after_alloc.append(num_external_tokens)
        if num_external_tokens:
            assert request.kv_transfer_params is not None
            payload = request.kv_transfer_params.payload
            self._loads.append((request.request_id, num_external_tokens, list(block_ids), payload))

    def build_connector_metadata(self, plan: StepPlan) -> Any:
        loads, self._loads = self._loads, []
        return loads

    def update_from_output(self, output: ConnectorOutput) -> None:
        self._world.heard_by_scheduler.append(output)

    def request_finished(
        self, request: KVRequest, block_ids: Sequence[int], num_computed_tokens: int, *, handoff: bool
    ) -> FinishDecision:
        if not handoff:
            return FinishDecision()
        transfer_id = f"{self._context.engine_id}/{request.request_id}"
        payload = {"engine": self._context.engine_id, "blocks": list(block_ids), "transfer": transfer_id}
        params = KVTransferParams(
            connector="direct", transfer_id=transfer_id, num_tokens=request.num_prompt_tokens, payload=payload
        )
        return FinishDecision(hold_blocks=True, kv_transfer_params=params)

    def close(self) -> None:
        self._world.num_closed += 1


class DirectWorker(NullWorker):
    def __init__(self, context: ConnectorContext, world: World) -> None:
        self._context = context
        self._world = world
        self._report = ConnectorOutput()
        self._held: dict[str, str] = {}

    def register_kv_caches(self, kv_cache: Any, spec: Any) -> None:
        self._memory = BlockMemory(kv_cache, spec, "direct")
        self._world.memories[self._context.engine_id] = self._memory

    def set_wake_up(self, wake: Callable[[], None]) -> None:
        self._world.wake_ups.append(wake)

    def start_load_kv(self, metadata: Any) -> None:
        for request_id, num_tokens, block_ids, payload in metadata:
            if self._world.is_broken:
                self._report.stats.count_failure("unreachable")
                if self._world.is_async:
                    self._report.failed_receiving[request_id] = 0
                else:
                    self._report.invalid_block_ids.update(block_ids)
                continue
            source = self._world.memories[payload["engine"]]
            for mine, theirs in zip(block_ids, payload["blocks"], strict=True):
                self._memory.get_view(mine)[:] = source.get_view(theirs)
            self._world.fetched.add(payload["transfer"])
            if self._world.is_async:
                self._report.finished_receiving.add(request_id)
                self._report.received_bytes[request_id] = num_tokens

    def wait_for_layer_load(self, layer: int) -> None:
        self._world.layer_calls.append(("load", layer))

    def save_kv_layer(self, layer: int) -> None:
        self._world.layer_calls.append(("save", layer))

    def get_finished(self, finished_request_ids: Sequence[str]) -> ConnectorOutput:
        for request_id in finished_request_ids:
            self._held[request_id] = f"{self._context.engine_id}/{request_id}"
        report, self._report = self._report, ConnectorOutput()
        for request_id, transfer_id in list(self._held.items()):
            if transfer_id in self._world.fetched:
                del self._held[request_id]
                report.finished_sending.add(request_id)
        return report

    def close(self) -> None:
        self._world.num_closed += 1


class DirectConnector:
    """Option ``world``: what the engines share."""

    features: ClassVar[ConnectorFeatures] = ConnectorFeatures(
        can_save=True, can_load=True, cancels_sends=True, hears_of_queue=True
    )

    @classmethod
    def build_scheduler(cls, context: ConnectorContext) -> DirectScheduler:
        return DirectScheduler(context, context.options["world"])

    @classmethod
    def build_worker(cls, context: ConnectorContext) -> DirectWorker:
        return DirectWorker(context, context.options["world"])


class LayerwiseConnector(DirectConnector):
    features: ClassVar[ConnectorFeatures] = ConnectorFeatures(can_save=True, can_load=True, layerwise=True)
