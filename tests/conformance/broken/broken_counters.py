"""A store that counts what it moves, honest, and broken in R23: the KV is right, and what it says of it is not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from honest_store import Block, HonestStore, Part, StoreWorker

from pdserve.connectors.base import ConnectorOutput, ConnectorStats

BROKEN: list[tuple[type[HonestStore], str]] = []


class CountingWorker(StoreWorker):
    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.stats = ConnectorStats()

    def write_entry(self, block: Block, payload: bytes) -> None:
        if block.name not in self.medium.entries:
            super().write_entry(block, payload)
            self.count_saved(block)

    def put_block(self, block: Block, payload: bytes) -> None:
        super().put_block(block, payload)
        self.count_loaded(block)

    def advance(self, part: Part) -> None:
        super().advance(part)
        if part.has_failed:
            self.count_lost(part)

    def count_saved(self, block: Block) -> None:
        self.stats.num_blocks_saved += 1
        self.stats.num_bytes_saved += self.spec.block_bytes

    def count_loaded(self, block: Block) -> None:
        self.stats.num_blocks_loaded += 1
        self.stats.num_bytes_loaded += self.spec.block_bytes

    def count_lost(self, part: Part) -> None:
        self.stats.count_failure("missing")

    def get_finished(self, finished_request_ids: Sequence[str]) -> ConnectorOutput:
        output = super().get_finished(finished_request_ids)
        output.stats = self.take_stats()
        return output

    def take_stats(self) -> ConnectorStats:
        stats, self.stats = self.stats, ConnectorStats()
        return stats


class CountingStore(HonestStore):
    worker_type: ClassVar[type[StoreWorker]] = CountingWorker


def breaks(worker: type[StoreWorker]) -> None:
    """Register a store with this half, called as it is."""
    BROKEN.append((type(worker.__name__, (CountingStore,), {"worker_type": worker}), "R23"))


class NeverStartsAnew(CountingWorker):
    """Reports all that it ever counted, each time."""

    def take_stats(self) -> ConnectorStats:
        return self.stats


class CountsWhatItAskedFor(CountingWorker):
    """Counts a load's blocks when it begins: those that are lost are counted too."""

    def start_load(self, transfer: Any) -> None:
        super().start_load(transfer)
        for block in transfer.blocks:
            super().count_loaded(block)

    def count_loaded(self, block: Block) -> None:
        pass


class SwallowsFailures(CountingWorker):
    """What is lost is reported, and counted nowhere."""

    def count_lost(self, part: Part) -> None:
        pass


class CountsBothWays(CountingWorker):
    """Two places count the same save: the one that takes a copy, and the one that writes it."""

    def copy_out(self, saves: Any) -> None:
        saves = list(saves)
        super().copy_out(saves)
        for block in (block for save in saves for block in save.blocks):
            self.count_saved(block)


breaks(NeverStartsAnew)
breaks(CountsWhatItAskedFor)
breaks(SwallowsFailures)
breaks(CountsBothWays)
