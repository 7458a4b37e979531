"""A store that saves layer by layer, and ones that take a layer at the wrong time."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from honest_store import Block, HonestStore, Metadata, StoreWorker

from pdserve.connectors.base import ConnectorFeatures, ConnectorOutput
from pdserve.connectors.testing.kv_content import Bytes

BROKEN: list[tuple[type[HonestStore], str]] = []


class LayerwiseWorker(StoreWorker):
    """Copies a layer of the step's blocks when it is told that the layer stands."""

    def start_load_kv(self, metadata: Metadata) -> None:
        super().start_load_kv(metadata)
        self.copies: dict[Block, Bytes] = {
            block: np.zeros(self.spec.block_bytes, dtype=np.uint8) for save in metadata.saves for block in save.blocks
        }

    def save_kv_layer(self, layer: int) -> None:
        for block, copy in self.copies.items():
            self.copy_layer(block, layer, copy)

    def copy_layer(self, block: Block, layer: int, copy: Bytes) -> None:
        size = self.spec.block_bytes // self.spec.num_layers
        span = slice(layer * size, (layer + 1) * size)
        copy[span] = np.frombuffer(super().read_block(block), dtype=np.uint8)[span]

    def read_block(self, block: Block) -> bytes:
        return self.copies[block].tobytes()


class LayerwiseStore(HonestStore):
    features: ClassVar[ConnectorFeatures] = ConnectorFeatures(
        can_save=True, can_load=True, is_store=True, layerwise=True
    )
    worker_type: ClassVar[type[StoreWorker]] = LayerwiseWorker


def breaks(rule: str, worker: type[LayerwiseWorker]) -> None:
    BROKEN.append((type(worker.__name__, (LayerwiseStore,), {"worker_type": worker}), rule))


class CopiesALayerBeforeItStands(LayerwiseWorker):
    """Takes the call before a layer for the one after it."""

    def wait_for_layer_load(self, layer: int) -> None:
        super().save_kv_layer(layer)

    def save_kv_layer(self, layer: int) -> None:
        pass


class CopiesALayerAhead(LayerwiseWorker):
    """Off by one: with each layer the next one too, and never the last by itself."""

    def save_kv_layer(self, layer: int) -> None:
        if layer + 1 < self.spec.num_layers:
            super().save_kv_layer(layer)
            super().save_kv_layer(layer + 1)


class StoresWhatAFailedPassBegan(LayerwiseWorker):
    """Layers of a forward pass that failed are taken for a block when the next step begins."""

    has_begun = False

    def start_load_kv(self, metadata: Metadata) -> None:
        if self.has_begun:
            self.copy_out(self.step_saves)
        self.has_begun = False
        super().start_load_kv(metadata)

    def save_kv_layer(self, layer: int) -> None:
        self.has_begun = True
        super().save_kv_layer(layer)

    def wait_for_save(self) -> None:
        self.has_begun = False
        super().wait_for_save()


class CopiesTheLastLayerInTheNextStep(LayerwiseWorker):
    """`wait_for_save` returns with the last layer still to be copied."""

    late: tuple[tuple[str, Block, Bytes], ...] = ()

    def start_load_kv(self, metadata: Metadata) -> None:
        for request_id, block, copy in self.late:
            super().copy_layer(block, self.spec.num_layers - 1, copy)
            self.writes.append((request_id, block, copy.tobytes()))
        self.late = ()
        super().start_load_kv(metadata)

    def copy_layer(self, block: Block, layer: int, copy: Bytes) -> None:
        if layer + 1 < self.spec.num_layers:
            super().copy_layer(block, layer, copy)

    def copy_out(self, saves: Any) -> None:
        saves = list(saves)
        self.known.update(save.request_id for save in saves)
        self.late = tuple((save.request_id, block, self.copies[block]) for save in saves for block in save.blocks)

    def report_sends(self, output: ConnectorOutput) -> None:
        busy = {request_id for request_id, _, _ in self.late}
        waiting, self.announced = self.announced & busy, self.announced - busy
        super().report_sends(output)
        self.announced |= waiting


breaks("R7", CopiesALayerBeforeItStands)
breaks("R7", CopiesALayerAhead)
breaks("R7", StoresWhatAFailedPassBegan)
breaks("R8", CopiesTheLastLayerInTheNextStep)
