"""Broken compositions: `MultiConnector` over honest children, with one thing wrong in what it makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from honest_store import HonestStore, StoreWorker

from pdserve.connectors.base import ConnectorContext, ConnectorOutput, FinishDecision, KVRequest
from pdserve.connectors.multi import MultiConnector
from pdserve.connectors.multi.children import build_halves, parse_children
from pdserve.connectors.multi.scheduler import MultiScheduler
from pdserve.connectors.multi.worker import MultiWorker

TWO_STORES = ["honest_store:HonestStore", "broken_compositions:SlowStore"]
DIRECT_AND_STORE = ["honest_direct:HonestDirect", "broken_compositions:SlowStore"]
RANKED_DIRECT_AND_STORE = ["ranked_connectors:RankedDirect", "ranked_connectors:RankedStore"]
QUEUE_AND_STORE = ["queue_directs:HonestQueue", "broken_compositions:SlowStore"]


class SlowWorker(StoreWorker):
    writes_a_step: ClassVar[int] = 1


class SlowStore(HonestStore):
    """Honest, and behind the others."""

    worker_type: ClassVar[type[StoreWorker]] = SlowWorker


class Composition(MultiConnector):
    """Halves of given classes over the children that ``kinds`` names."""

    kinds: ClassVar[Sequence[str]] = TWO_STORES
    scheduler_type: ClassVar[type[MultiScheduler]] = MultiScheduler
    worker_type: ClassVar[type[MultiWorker]] = MultiWorker

    @classmethod
    def build_scheduler(cls, context: ConnectorContext) -> MultiScheduler:
        children = parse_children(context.options)
        halves = build_halves(context, children, lambda child, own: child.connector.build_scheduler(own))
        return cls.scheduler_type(context, children, halves)

    @classmethod
    def build_worker(cls, context: ConnectorContext) -> MultiWorker:
        children = parse_children(context.options)
        halves = build_halves(context, children, lambda child, own: child.connector.build_worker(own))
        return cls.worker_type(halves, [], [child.name for child in children], context.rank)


class DirectAndStore(Composition):
    kinds = DIRECT_AND_STORE


class RankedComposition(Composition):
    kinds = RANKED_DIRECT_AND_STORE


HONEST: list[type[Composition]] = [Composition, DirectAndStore]
BROKEN: list[tuple[type[Composition], str]] = []


def breaks(
    kinds: Sequence[str],
    scheduler: type[MultiScheduler] = MultiScheduler,
    worker: type[MultiWorker] = MultiWorker,
    rule: str = "R17",
) -> None:
    """Register a composition made of these halves; it is called as the half that is wrong."""
    name = (worker if scheduler is MultiScheduler else scheduler).__name__
    parts = {"kinds": kinds, "scheduler_type": scheduler, "worker_type": worker}
    BROKEN.append((type(name, (Composition,), parts), rule))


class CountsEveryChildsEnd(MultiWorker):
    """Tells the engine of a sending whenever a child has ended it."""

    def _take_sent(self, index: int, request_id: str, report: ConnectorOutput, joint: ConnectorOutput) -> None:
        super()._take_sent(index, request_id, report, joint)
        joint.finished_sending.add(request_id)


class EndsWithTheFirstChild(MultiWorker):
    """Tells the engine of a sending when the first child has ended it; others may still write."""

    def _take_sent(self, index: int, request_id: str, report: ConnectorOutput, joint: ConnectorOutput) -> None:
        send = self._sends.get(request_id)
        if send is not None and index == 0:
            send.pending = {index}
            super()._take_sent(index, request_id, report, joint)


class ForgetsTheSecondChildsDue(MultiWorker):
    """Waits for all children, and lets only the first know that somebody waits."""

    def get_finished(self, finished_request_ids: Sequence[str]) -> ConnectorOutput:
        real = self._halves[1].get_finished
        self._halves[1].get_finished = lambda _: real(())  # type: ignore[method-assign]
        try:
            return super().get_finished(finished_request_ids)
        finally:
            self._halves[1].get_finished = real  # type: ignore[method-assign]


class LosesAChildsFailure(MultiWorker):
    """Passes on loads that ended well, and no others."""

    def get_finished(self, finished_request_ids: Sequence[str]) -> ConnectorOutput:
        output = super().get_finished(finished_request_ids)
        output.failed_receiving.clear()
        return output


class AsksTheChildThatFailed(MultiScheduler):
    """Has the first child promise again what it could not load, until the engine gives up."""

    def _list_candidates(self, request_id: str) -> list[int]:
        return [0] if self._failed_by.get(request_id) else super()._list_candidates(request_id)


class HoldsOnlyIfAllDo(MultiScheduler):
    """Frees the blocks if one child needs none."""

    def _join(self, request_id: str, decisions: Sequence[FinishDecision]) -> FinishDecision:
        joint = super()._join(request_id, decisions)
        holds = all(decision.hold_blocks for decision in decisions)
        return FinishDecision(holds, joint.kv_transfer_params, joint.announce_when_sent)


class KeepsCancellationsToItself(MultiScheduler):
    """The child that holds the blocks is not told."""

    def cancel_send(self, request_id: str) -> None:
        pass


class KeepsTheQueueToItself(MultiScheduler):
    """The child whose lease runs is not told that somebody waits for its turn."""

    def request_queued(self, request: KVRequest) -> None:
        pass


breaks(TWO_STORES, worker=CountsEveryChildsEnd)
breaks(TWO_STORES, worker=EndsWithTheFirstChild)
breaks(TWO_STORES, worker=ForgetsTheSecondChildsDue)
breaks(TWO_STORES, worker=LosesAChildsFailure)
breaks(TWO_STORES, AsksTheChildThatFailed)
breaks(DIRECT_AND_STORE, HoldsOnlyIfAllDo)
breaks(DIRECT_AND_STORE, KeepsCancellationsToItself)
breaks(QUEUE_AND_STORE, KeepsTheQueueToItself, rule="R18")
