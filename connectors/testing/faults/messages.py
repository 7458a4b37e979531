"""What may happen between an engine and a connector's worker half."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from pdserve.connectors.base import ConnectorMetadata, ConnectorOutput, KVConnectorWorker
from pdserve.kv_layout import KVCacheSpec


class _PassingWorker:
    """Hands every call on; what follows derives from it and changes one."""

    def __init__(self, worker: KVConnectorWorker) -> None:
        self._worker = worker

    def register_kv_caches(self, kv_cache: torch.Tensor, spec: KVCacheSpec) -> None:
        self._worker.register_kv_caches(kv_cache, spec)

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        self._worker.start_load_kv(metadata)

    def wait_for_layer_load(self, layer: int) -> None:
        self._worker.wait_for_layer_load(layer)

    def save_kv_layer(self, layer: int) -> None:
        self._worker.save_kv_layer(layer)

    def wait_for_save(self) -> None:
        self._worker.wait_for_save()

    def get_finished(self, finished_request_ids: Sequence[str]) -> ConnectorOutput:
        return self._worker.get_finished(finished_request_ids)

    def close(self) -> None:
        self._worker.close()


class _RepeatingWorker(_PassingWorker):
    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        self._worker.start_load_kv(metadata)
        self._worker.start_load_kv(metadata)


class _LateWorker(_PassingWorker):
    def __init__(self, worker: KVConnectorWorker, num_steps: int) -> None:
        super().__init__(worker)
        self._reports = deque(ConnectorOutput() for _ in range(num_steps))

    def get_finished(self, finished_request_ids: Sequence[str]) -> ConnectorOutput:
        self._reports.append(self._worker.get_finished(finished_request_ids))
        return self._reports.popleft()


def repeat_messages(worker: KVConnectorWorker) -> KVConnectorWorker:
    """Every step's message arrives twice."""
    return _RepeatingWorker(worker)


def delay_reports(worker: KVConnectorWorker, num_steps: int = 7) -> KVConnectorWorker:
    """Every report arrives ``num_steps`` steps late."""
    return _LateWorker(worker, num_steps)
