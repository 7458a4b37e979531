"""The worker halves of an engine of several ranks, and the engine's part in making one report of theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import torch

from pdserve.connectors.base import (
    ChoosesLayerSteps,
    ConnectorContext,
    ConnectorMetadata,
    ConnectorOutput,
    KVConnector,
    KVConnectorWorker,
)
from pdserve.connectors.output_aggregator import OutputAggregator
from pdserve.connectors.testing.kv_share import KVShare
from pdserve.connectors.testing.violations import RuleViolationError
from pdserve.connectors.testing.wire import Wire
from pdserve.kv_layout import KVCacheSpec


def build_worker_halves(connector: type[KVConnector], contexts: Sequence[ConnectorContext]) -> list[KVConnectorWorker]:
    """One for each rank; when one cannot be built, those before it are closed."""
    with contextlib.ExitStack() as built:
        halves = []
        for context in contexts:
            halves.append(connector.build_worker(context))
            built.callback(halves[-1].close)
        built.pop_all()
    return halves


class RankWorkers:
    """To the harness one worker half; each rank gets messages of its own, and one may be slow.

    Args:
        halves: the ranks' worker halves, in their order.
        shares: their memory.
        wire: between the halves.
    """

    def __init__(self, halves: Sequence[KVConnectorWorker], shares: Sequence[KVShare], wire: Wire) -> None:
        self._halves = halves
        self._shares = shares
        self._wire = wire
        self._aggregator = OutputAggregator(len(halves))
        self._held: dict[int, list[ConnectorMetadata]] = {}
        self._due: list[list[str]] = [[] for _ in halves]
        self._reported: list[set[str]] = [set() for _ in halves]

    def expect(self, loads: Iterable[str], sends: Iterable[str]) -> None:
        """What begins in the coming step; see `OutputAggregator.expect`."""
        self._aggregator.expect(loads, sends)

    def has_reported(self, rank: int, request_id: str) -> bool:
        """Whether the rank has ever reported the end of a load of the request."""
        return request_id in self._reported[rank]

    def hold(self, rank: int) -> None:
        """The rank gets no messages for a while, and takes no part in the steps."""
        self._held[rank] = []

    def let_go(self, rank: int) -> None:
        """It gets what it missed, in order."""
        for metadata in self._held.pop(rank):
            self._halves[rank].start_load_kv(metadata)
            self._halves[rank].wait_for_save()

    # --- the worker half ------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_cache: torch.Tensor, spec: KVCacheSpec) -> None:
        """Each rank has memory of its own; ``kv_cache`` is the first one's."""
        for half, share in zip(self._halves, self._shares, strict=True):
            half.register_kv_caches(share.kv_cache, share.spec)

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        """To each rank a copy."""
        for rank, half in enumerate(self._halves):
            own = self._wire.carry_metadata(metadata)
            if rank in self._held:
                self._held[rank].append(own)
            else:
                half.start_load_kv(own)

    def wants_layers(self) -> bool:
        """Whether any of them does; each is asked once a step."""
        wants = [not isinstance(half, ChoosesLayerSteps) or half.wants_layers() for half in self._get_active()]
        return any(wants)

    def wait_for_layer_load(self, layer: int) -> None:
        """All wait."""
        for half in self._get_active():
            half.wait_for_layer_load(layer)

    def save_kv_layer(self, layer: int) -> None:
        """All are told."""
        for half in self._get_active():
            half.save_kv_layer(layer)

    def wait_for_save(self) -> None:
        """All wait."""
        for half in self._get_active():
            half.wait_for_save()

    def get_finished(self, finished_request_ids: Sequence[str]) -> ConnectorOutput:
        """One report of all.

        Raises:
            RuleViolationError: a rank has reported what it was not to, or had reported before.
        """
        outputs = [self._ask(rank, finished_request_ids) for rank in range(len(self._halves))]
        for reported, output in zip(self._reported, outputs, strict=True):
            reported.update(output.finished_receiving, output.failed_receiving)
        merged = self._aggregator.merge(outputs)
        if merged.stats.failures.get("late_report"):
            raise RuleViolationError("R9", "a rank reported the end of a transfer that nobody waits for, or twice")
        return merged

    def close(self) -> None:
        """Close every one, whatever another does."""
        with contextlib.ExitStack() as stack:
            for half in self._halves:
                stack.callback(half.close)

    def _ask(self, rank: int, finished_request_ids: Sequence[str]) -> ConnectorOutput:
        self._due[rank] += finished_request_ids
        if rank in self._held:
            return ConnectorOutput()
        due, self._due[rank] = self._due[rank], []
        return self._wire.carry_output(self._halves[rank].get_finished(due))

    def _get_active(self) -> list[KVConnectorWorker]:
        return [half for rank, half in enumerate(self._halves) if rank not in self._held]
