"""The half beside a model runner: runs every child, and makes one report of theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pdserve.connectors.base import (
    ChoosesLayerSteps,
    ConnectorMetadata,
    ConnectorOutput,
    ConnectorStats,
    KVConnectorWorker,
    WakesEngine,
)
from pdserve.connectors.multi.messages import ChildSent, MultiMetadata, MultiReport, OwedSend
from pdserve.connectors.multi.params import CONNECTOR_NAME
from pdserve.kv_layout import KVCacheSpec, Rank


@dataclass(slots=True)
class _Send:
    """A request's sending.

    Attributes:
        pending: children that have not reported.
        is_awaited: whether the engine waits for the end.
        is_saved: whether one of those that have reported saved it whole.
        num_bytes: that all of them sent.
    """

    pending: set[int]
    is_awaited: bool
    is_saved: bool = False
    num_bytes: int = 0


class MultiWorker:
    """Lives on the forward thread.

    Args:
        halves: the children's worker halves, in order.
        layerwise: those of them that want their layer hooks called.
        names: of the children, as in ``halves``.
        rank: whose halves they are.
    """

    def __init__(
        self,
        halves: Sequence[KVConnectorWorker],
        layerwise: Sequence[KVConnectorWorker],
        names: Sequence[str],
        rank: Rank,
    ) -> None:
        self._rank = rank
        self._halves = halves
        self._names = names
        self._layerwise = layerwise
        self._in_layers: Sequence[KVConnectorWorker] = ()
        self._loading_by: dict[str, int] = {}
        self._sends: dict[str, _Send] = {}
        self._due: dict[str, OwedSend] = {}
        self._sent: list[ChildSent] = []

    def register_kv_caches(self, kv_cache: torch.Tensor, spec: KVCacheSpec) -> None:
        """All children share the memory.

        Raises:
            ConfigError: it does not suit one of them.
        """
        for half in self._halves:
            half.register_kv_caches(kv_cache, spec)

    def set_wake_up(self, wake: Callable[[], None]) -> None:
        """Passed on to the children that can use it."""
        for half in self._halves:
            if isinstance(half, WakesEngine):
                half.set_wake_up(wake)

    def start_load_kv(self, metadata: MultiMetadata[Sequence[ConnectorMetadata]]) -> None:
        """Begin every child's loads."""
        for load in metadata.loads:
            self._loading_by.setdefault(load.request_id, load.child)
        self._due = {send.request_id: send for send in metadata.sends}
        for half, part in zip(self._halves, metadata.parts, strict=True):
            half.start_load_kv(part)

    def wants_layers(self) -> bool:
        """Whether any child has a use for its layer hooks in this step; only those are called."""
        self._in_layers = [half for half in self._layerwise if _wants_layers(half)]
        return bool(self._in_layers)

    def wait_for_layer_load(self, layer: int) -> None:
        """Wait for every layerwise child."""
        for half in self._in_layers:
            half.wait_for_layer_load(layer)

    def save_kv_layer(self, layer: int) -> None:
        """Tell every layerwise child."""
        for half in self._in_layers:
            half.save_kv_layer(layer)

    def wait_for_save(self) -> None:
        """Every child takes what it saves."""
        for half in self._halves:
            half.wait_for_save()

    def get_finished(self, finished_request_ids: Sequence[str]) -> ConnectorOutput:
        """What ended since the last call, each transfer once: a sending when the last child has reported it."""
        joint = ConnectorOutput()
        due: list[list[str]] = [[] for _ in self._halves]
        unawaited = [request_id for request_id, owed in self._due.items() if not owed.is_awaited]
        for request_id in (*finished_request_ids, *unawaited):
            owed = self._due.pop(request_id, None)
            if owed is None or request_id in self._sends:
                joint.stats.count_failure("unknown")
                continue
            self._sends[request_id] = _Send(set(owed.children), owed.is_awaited)
            for index in owed.children:
                due[index].append(request_id)
        said: list[list[Any]] = []
        for index, half in enumerate(self._halves):
            report = half.get_finished(due[index])
            self._take(index, report, joint)
            said.append(report.messages)
        self._pass_on(tuple(said), joint)
        _sum_up(joint)
        return joint

    def close(self) -> None:
        """Close every child, whatever another one does. Idempotent."""
        with contextlib.ExitStack() as stack:
            for half in self._halves:
                stack.callback(half.close)

    def _pass_on(self, said: tuple[list[Any], ...], joint: ConnectorOutput) -> None:
        sent, self._sent = self._sent, []
        if sent or any(said):
            joint.messages.append(MultiReport(self._rank.index, said, sent))

    def _take(self, index: int, report: ConnectorOutput, joint: ConnectorOutput) -> None:
        name = self._names[index]
        joint.parts |= {f"{name}/{part}": stats for part, stats in report.parts.items()} or {name: report.stats}
        joint.invalid_block_ids |= report.invalid_block_ids
        for request_id in report.finished_sending | report.failed_sending:
            self._take_sent(index, request_id, report, joint)
        for request_id in (*report.finished_receiving, *report.failed_receiving):
            if self._loading_by.get(request_id) != index:
                joint.stats.count_failure("unknown")
                continue
            del self._loading_by[request_id]
            joint.received_bytes[request_id] = report.received_bytes.get(request_id, 0)
            if request_id in report.failed_receiving:
                joint.failed_receiving[request_id] = report.failed_receiving[request_id]
            else:
                joint.finished_receiving.add(request_id)

    def _take_sent(self, index: int, request_id: str, report: ConnectorOutput, joint: ConnectorOutput) -> None:
        send = self._sends.get(request_id)
        if send is None or index not in send.pending:
            joint.stats.count_failure("unknown")
            return
        is_saved, num_bytes = request_id not in report.failed_sending, report.sent_bytes.get(request_id, 0)
        self._sent.append(ChildSent(index, request_id, is_saved, num_bytes))
        send.pending.discard(index)
        send.is_saved |= is_saved
        send.num_bytes += num_bytes
        if send.pending:
            return
        del self._sends[request_id]
        if send.is_awaited:
            joint.finished_sending.add(request_id)
            joint.sent_bytes[request_id] = send.num_bytes
            if not send.is_saved:
                joint.failed_sending.add(request_id)


def _sum_up(joint: ConnectorOutput) -> None:
    """What was counted so far is the composition's own; what the children counted comes on top."""
    joint.parts.setdefault(CONNECTOR_NAME, ConnectorStats()).add(joint.stats)
    joint.stats = ConnectorStats()
    for stats in joint.parts.values():
        joint.stats.add(stats)


def _wants_layers(half: KVConnectorWorker) -> bool:
    return not isinstance(half, ChoosesLayerSteps) or half.wants_layers()
