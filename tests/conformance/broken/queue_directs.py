"""A direct connector whose leases last as long as the consumer's queue, honest, and broken in its rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from honest_direct import ENDPOINTS, DirectScheduler, DirectWorker, HonestDirect, Metadata

from pdserve.connectors.base import ConnectorFeatures, KVRequest, StepPlan

BROKEN: list[tuple[type[HonestDirect], str]] = []


class QueueMetadata(Metadata, frozen=True):
    queued: Sequence[tuple[str, str]] = ()


class QueueScheduler(DirectScheduler):
    """Tells in each step which transfers are waited for."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.queued: dict[str, tuple[str, str]] = {}

    def request_queued(self, request: KVRequest) -> None:
        params = self.get_params(request)
        if params is not None:
            self.queued[request.request_id] = (self.get_address(params), self.get_transfer(params))

    def leave_queue(self, request_id: str) -> None:
        self.queued.pop(request_id, None)

    def update_state_after_alloc(self, request: KVRequest, *counts: Any) -> None:
        self.leave_queue(request.request_id)
        super().update_state_after_alloc(request, *counts)

    def request_finished(self, request: KVRequest, *counts: Any, handoff: bool) -> Any:
        self.leave_queue(request.request_id)
        return super().request_finished(request, *counts, handoff=handoff)

    def build_connector_metadata(self, plan: StepPlan) -> Any:
        metadata = super().build_connector_metadata(plan)
        return QueueMetadata(**msgspec.structs.asdict(metadata), queued=list(self.queued.values()))


class QueueWorker(DirectWorker):
    """Each step in which a transfer is waited for is a sign of life."""

    def start_load_kv(self, metadata: Any) -> None:
        super().start_load_kv(metadata)
        for address, transfer_id in metadata.queued:
            endpoint = ENDPOINTS.get(address)
            if endpoint is not None and endpoint.worker is not None and transfer_id in endpoint.holds:
                endpoint.deadlines[transfer_id] = endpoint.worker.now() + endpoint.worker.lease_s


class HonestQueue(HonestDirect):
    features: ClassVar[ConnectorFeatures] = ConnectorFeatures(can_save=True, can_load=True, hears_of_queue=True)
    scheduler_type: ClassVar[type[DirectScheduler]] = QueueScheduler
    worker_type: ClassVar[type[DirectWorker]] = QueueWorker


def breaks(rule: str, scheduler: type[DirectScheduler]) -> None:
    """Register a connector with this half, called as it is."""
    BROKEN.append((type(scheduler.__name__, (HonestQueue,), {"scheduler_type": scheduler}), rule))


class OneSignOfLife(QueueScheduler):
    """Tells of a queued request once, in the step after."""

    def build_connector_metadata(self, plan: StepPlan) -> Any:
        metadata = super().build_connector_metadata(plan)
        self.queued = {}
        return metadata


class KeepsItsPlace(QueueScheduler):
    """Goes on giving signs of life for a request that has ended, and takes nothing back."""

    def leave_queue(self, request_id: str) -> None:
        pass

    def release(self, params: Any) -> None:
        if self.get_transfer(params) not in {transfer_id for _, transfer_id in self.queued.values()}:
            super().release(params)


breaks("R18", OneSignOfLife)
breaks("R18", KeepsItsPlace)
