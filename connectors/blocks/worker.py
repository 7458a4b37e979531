"""The half beside a model runner, for any store: composes loader and saver, and keeps the step's order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from pdserve.connectors.base import ConnectorContext, ConnectorOutput
from pdserve.connectors.blocks.block_format import BlockFormat
from pdserve.connectors.blocks.block_memory import BlockMemory
from pdserve.connectors.blocks.drafts import StepDrafts
from pdserve.connectors.blocks.failures import WarningLimiter
from pdserve.connectors.blocks.loads import BlockLoader
from pdserve.connectors.blocks.messages import SaveRequest, StepMetadata
from pdserve.connectors.blocks.options import TransferOptions
from pdserve.connectors.blocks.read_pace import ReadPace
from pdserve.connectors.blocks.saves import BlockSaver
from pdserve.connectors.blocks.staging import StagingPool
from pdserve.connectors.blocks.store import BlockStore, DraftingStore
from pdserve.connectors.blocks.task_threads import TaskThreads
from pdserve.kv_layout import KVCacheSpec

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0


class StoreWorker:
    """Lives on the forward thread; readers and writers are its own threads.

    Args:
        connector: the connector's name.
        context: the engine.
        options: bounds and numbers of threads.
        store: where blocks go and come from; closed with this half.
        layerwise: save beside the forward pass, where the store takes blocks piece by piece.
        places_writers: writers of whole blocks wake on the core that the forward thread leaves free; otherwise where
            the system likes.
    """

    def __init__(
        self,
        connector: str,
        context: ConnectorContext,
        options: TransferOptions,
        store: BlockStore,
        *,
        layerwise: bool = False,
        places_writers: bool = True,
    ) -> None:
        clock = time.monotonic
        warnings = WarningLimiter(logger, clock)
        block_format = BlockFormat(context.identity, context.spec, context.rank)
        num_slots = options.max_staging_bytes // block_format.value_bytes
        self._connector = connector
        self._store = store
        self._staging = StagingPool(num_slots, block_format.value_bytes, clock)
        self._readers = TaskThreads("kv-load", options.reader_threads, nice=options.reader_nice, spares_caller=True)
        # Layers are short pieces, often: two writers that float have less left at a step's end than one beside it.
        is_placed = places_writers and not layerwise
        self._writers = TaskThreads("kv-save", options.writer_threads, spares_caller=True, is_placed=is_placed)
        self._pace = ReadPace()
        self._loader = BlockLoader(
            store,
            context.spec.block_bytes,
            self._readers,
            warnings,
            pace=self._pace,
            timeout_s=options.load_timeout_s,
            clock=clock,
        )
        drafts = None
        if layerwise and isinstance(store, DraftingStore):
            drafts = StepDrafts(store, context.spec, self._staging, self._writers)
        self._saver = BlockSaver(
            store,
            block_format,
            self._staging,
            self._writers,
            warnings,
            drafts=drafts,
            timeout_s=options.save_timeout_s,
            clock=clock,
        )
        self._memory: BlockMemory | None = None
        self._step_saves: Sequence[SaveRequest] = ()

    def set_wake_up(self, wake: Callable[[], None]) -> None:
        """Called when a load or a sending can be reported."""
        self._loader.set_wake_up(wake)
        self._saver.set_wake_up(wake)

    def register_kv_caches(self, kv_cache: torch.Tensor, spec: KVCacheSpec) -> None:
        """Take the memory that blocks are loaded into and saved from.

        Raises:
            ConfigError: it is not in CPU memory, or not of the expected shape.
        """
        self._memory = BlockMemory(kv_cache, spec, self._connector)

    def start_load_kv(self, metadata: StepMetadata) -> None:
        """Queue the step's loads; what the step saves waits for its layers, or for `wait_for_save`.

        Saves of an earlier step whose forward pass failed are dropped: their KV was never computed.
        """
        self._saver.forget(metadata.forgotten_request_ids)
        self._step_saves = metadata.saves
        if self._memory is not None:
            self._saver.begin_step(metadata.saves, self._memory)
            if metadata.has_tokens:
                self._pace.begin_step()
            for load in metadata.loads:
                self._loader.start(load, self._memory)
            if not metadata.has_tokens or self._loader.is_behind:
                self._readers.help_here()

    def wait_for_layer_load(self, layer: int) -> None:
        """Loads are asynchronous and move whole blocks: there is nothing to wait for."""

    def wants_layers(self) -> bool:
        """Only in a step that saves layer by layer."""
        return self._saver.wants_layers

    def save_kv_layer(self, layer: int) -> None:
        """Copy the layers that stand, now and then; writing them happens on the writer threads."""
        self._saver.save_layer(layer)

    def wait_for_save(self) -> None:
        """Copy the step's complete blocks; writing them happens on the writer threads."""
        saves, self._step_saves = self._step_saves, ()
        if self._memory is not None:
            self._saver.save(saves, self._memory)

    def get_finished(self, finished_request_ids: Sequence[str]) -> ConnectorOutput:
        """What ended since the last call."""
        self._pace.end_step()
        report = self._loader.take_report()
        sent = self._saver.take_report(finished_request_ids)
        report.finished_sending = sent.finished_sending
        report.failed_sending = sent.failed_sending
        report.sent_bytes = sent.sent_bytes
        report.stats.add(sent.stats)
        return report

    def close(self) -> None:
        """Drop what has not begun, wait a bounded time for what has, and let go of the memory. Idempotent."""
        self._memory = None
        self._staging.close()
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        have_readers_ended, have_writers_ended = (
            threads.close(max(deadline - time.monotonic(), 0.0)) for threads in (self._readers, self._writers)
        )
        if not (have_readers_ended and have_writers_ended):
            logger.warning("a transfer did not end within %g s", _CLOSE_TIMEOUT_S)
        if have_writers_ended:
            self._saver.close()
        self._store.close()
