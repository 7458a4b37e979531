"""A store that wakes the engine whenever it has more to do, honest, and broken in that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from honest_store import HonestStore, StoreWorker

from pdserve.connectors.base import ConnectorFeatures, ConnectorOutput

BROKEN: list[tuple[type[HonestStore], str]] = []


class WakingWorker(StoreWorker):
    """Work is done in steps: each one asks for the next."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.wake: Callable[[], None] = lambda: None

    def set_wake_up(self, wake: Callable[[], None]) -> None:
        self.wake = wake

    def get_finished(self, finished_request_ids: Sequence[str]) -> ConnectorOutput:
        output = super().get_finished(finished_request_ids)
        if self.wants_a_step():
            self.wake()
        return output

    def wants_a_step(self) -> bool:
        return bool(self.writes or self.loads)


class WakingStore(HonestStore):
    features: ClassVar[ConnectorFeatures] = ConnectorFeatures(
        can_save=True, can_load=True, is_store=True, wakes_engine=True
    )
    worker_type: ClassVar[type[StoreWorker]] = WakingWorker


def breaks(rule: str, worker: type[StoreWorker]) -> None:
    """Register a connector with this half, called as it is."""
    BROKEN.append((type(worker.__name__, (WakingStore,), {"worker_type": worker}), rule))


class WakesForLoadsOnly(WakingWorker):
    def wants_a_step(self) -> bool:
        return bool(self.loads)


class WakesTooEarly(WakingWorker):
    """When a load begins, and not when it has ended."""

    def start_load(self, transfer: Any) -> None:
        super().start_load(transfer)
        self.wake()

    def wants_a_step(self) -> bool:
        return bool(self.writes)


breaks("R20", WakesForLoadsOnly)
breaks("R20", WakesTooEarly)
