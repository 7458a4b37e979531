"""Saving beside the forward pass: blocks whose layers go to the store while the next ones are computed.

A step's way::

    forward thread                                      writer thread
    before the first layer: a staging slot each
    after every few layers: copy them to staging ─────> append them to the blocks' drafts
    after the last: copy it, hand over to the saver ──> the last piece, publication

When the forward pass fails, nobody takes the blocks, and their drafts are abandoned. A draft is never more than an
advance on the ordinary way: whatever goes wrong with it, the staging slot holds the whole block in the end.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterable, Sequence

from pdserve.connectors.blocks.block_format import HEADER_BYTES
from pdserve.connectors.blocks.block_memory import BlockMemory
from pdserve.connectors.blocks.messages import BlockTransfer
from pdserve.connectors.blocks.staging import NO_WAIT, StagingPool
from pdserve.connectors.blocks.store import BlockDraft, DraftingStore
from pdserve.connectors.blocks.task_threads import TaskThreads
from pdserve.kv_layout import KVCacheSpec

# Before the last layer, which is a piece of its own: all that is left to write when the forward pass ends. A piece
# more costs each block a write; one less begins later, and a slow store has not ended it when the last layer comes.
_NUM_EARLY_PIECES = 3
# Each draft is an open file or the like.
_MAX_DRAFTS = 64


class DraftedBlock:
    """A block whose first layers are written before its last ones are computed.

    Args:
        block: the block.
        slot: of the staging memory.
        payload: that slot's bytes behind the header.
        layer_bytes: of them, for each layer.
        store: where its draft goes.

    Attributes:
        slot: as given.
        seconds: that writers have spent on it.
    """

    def __init__(
        self, block: BlockTransfer, slot: int, payload: memoryview, layer_bytes: int, store: DraftingStore
    ) -> None:
        self.slot = slot
        self.seconds = 0.0
        self._block = block
        self._payload = payload
        self._layer_bytes = layer_bytes
        self._store = store
        self._num_copied_layers = 0
        self._num_written_layers = 0
        self._lock = threading.Lock()
        self._draft: BlockDraft | None = None
        self._is_over = False

    def copy_layers(self, end: int, memory: BlockMemory) -> None:
        """Copy the layers up to ``end`` that are not copied yet. Called on the forward thread."""
        if end > self._num_copied_layers:
            block = self._block
            memory.copy_layers_out(block.block_id, block.num_tokens, self._num_copied_layers, end, self._payload)
            self._num_copied_layers = end  # the writers' sign that the bytes are there

    def write_copied(self) -> None:
        """Append what is copied and not written. Called on writer threads."""
        with self._lock:
            self._write_copied()

    def publish(self) -> bool:
        """Write the rest of the block, which is copied whole; whether it is stored now. Called on writer threads."""
        with self._lock:
            self._write_copied()
            draft, self._draft, self._is_over = self._draft, None, True
            began = time.perf_counter()
            is_stored = draft is not None and draft.publish()
            self.seconds += time.perf_counter() - began
            return is_stored

    def abandon(self) -> None:
        """Remove the draft; nothing is written any more. Called on writer threads, or when they have ended."""
        with self._lock:
            draft, self._draft, self._is_over = self._draft, None, True
            if draft is not None:
                draft.abandon()

    def _write_copied(self) -> None:
        start, end = self._num_written_layers, self._num_copied_layers
        if self._is_over or start == end:
            return
        began = time.perf_counter()
        if self._draft is None:
            self._draft = self._store.begin_draft(self._block.key)
        self._draft.append(self._payload[start * self._layer_bytes : end * self._layer_bytes])
        self._num_written_layers = end
        self.seconds += time.perf_counter() - began


class StepDrafts:
    """The blocks of the step under way that are saved beside its forward pass. Lives on the forward thread.

    Args:
        store: where they go.
        spec: shape of a block.
        staging: memory for the copies; a step takes what is free and never waits here.
        threads: run the writes.
    """

    def __init__(self, store: DraftingStore, spec: KVCacheSpec, staging: StagingPool, threads: TaskThreads) -> None:
        self._store = store
        self._staging = staging
        self._threads = threads
        self._layer_bytes = spec.block_bytes // spec.num_layers
        self._num_layers = spec.num_layers
        num_early_layers = self._num_layers - 1
        self._early_ends = {
            -(-num_early_layers * piece // _NUM_EARLY_PIECES) for piece in range(1, _NUM_EARLY_PIECES + 1)
        }
        # The step's other blocks need staging memory as well, and these hold theirs to the step's end.
        self._max_blocks = min(_MAX_DRAFTS, staging.num_free // 2)
        self._blocks: dict[bytes, DraftedBlock] = {}
        self._memory: BlockMemory | None = None

    def __len__(self) -> int:
        return len(self._blocks)

    def begin(self, blocks: Iterable[BlockTransfer], memory: BlockMemory) -> None:
        """Take these blocks, which are whole after the forward pass, or as many as there is room for now."""
        self._memory = memory
        for block in blocks:
            slot = self._staging.acquire(NO_WAIT) if len(self._blocks) < self._max_blocks else None
            if slot is None:
                return
            payload = self._staging.get_buffer(slot).data[HEADER_BYTES:]
            self._blocks[block.digest] = DraftedBlock(block, slot, payload, self._layer_bytes, self._store)

    def save_layer(self, layer: int) -> None:
        """``layer`` of all blocks stands in KV memory, and so do those before it."""
        end = layer + 1
        if self._memory is None or not self._blocks or end not in self._early_ends:
            return
        blocks = tuple(self._blocks.values())
        for block in blocks:
            block.copy_layers(end, self._memory)
        self._threads.submit(functools.partial(_write_all, blocks))

    def take(self, digest: bytes) -> DraftedBlock | None:
        """The block, copied whole, if it was begun early; the forward pass has ended."""
        block = self._blocks.pop(digest, None)
        if block is not None and self._memory is not None:
            block.copy_layers(self._num_layers, self._memory)
        return block

    def drop(self) -> None:
        """Nobody takes what is left: its forward pass failed."""
        blocks, self._blocks = tuple(self._blocks.values()), {}
        if blocks:
            self._threads.submit(functools.partial(self._abandon_all, blocks))

    def close(self) -> None:
        """`drop`, when the threads have ended; idempotent."""
        for block in self._blocks.values():
            block.abandon()
        self._blocks.clear()

    def _abandon_all(self, blocks: Sequence[DraftedBlock]) -> None:
        for block in blocks:
            block.abandon()
            self._staging.release(block.slot)


def _write_all(blocks: Sequence[DraftedBlock]) -> None:
    for block in blocks:
        block.write_copied()
