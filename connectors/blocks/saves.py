"""Saving: blocks of KV memory into a store, with the forward thread paying for a copy in memory only.

A block's way::

    forward thread                          writer thread
    is it stored, or being written? ──yes──> nothing to do, or wait for that write
      │ no
    copy into a staging buffer ───queue────> checksum, write in batches ──> settle everybody who waits for the key

Layer-wise, copies and writes begin while the forward pass runs (`drafts`); nobody waits for a block before it ended.
A request's sending has ended when the engine has announced the request's end and none of its keys is being written, or
when a write does not end: then it has failed, and only the thread that hangs and its staging buffer are tied up.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pdserve.connectors.base import ConnectorOutput, ConnectorStats
from pdserve.connectors.blocks.block_format import HEADER_BYTES, BlockFormat
from pdserve.connectors.blocks.block_memory import BlockMemory
from pdserve.connectors.blocks.drafts import DraftedBlock, StepDrafts
from pdserve.connectors.blocks.failures import Backoff, Failure, WarningLimiter
from pdserve.connectors.blocks.messages import BlockTransfer, SaveRequest
from pdserve.connectors.blocks.staging import NO_WAIT, StagingPool
from pdserve.connectors.blocks.store import (
    BlockStore,
    EvictingStore,
    ForgetfulStore,
    PreparingStore,
    SealedBlock,
    WriteResult,
)
from pdserve.connectors.blocks.task_threads import TaskThreads
from pdserve.kv_layout import BlockKey

# An ended request waits so long for the next of its writes to end: longer than any that goes on, and no longer than
# computing a prompt anew.
_STUCK_AFTER_S = 5.0
# Among a request's keys: the question whether all of them are there.
_QUESTION = b""


@dataclass(slots=True, eq=False)
class _Sender:
    """One request whose blocks are being saved.

    Attributes:
        pending: keys being written.
        failed: keys that could not be written and have not been since.
        num_bytes: written on this request's behalf.
        promised: keys that the store keeps until this request's sending has ended: later blocks of a prompt do not
            evict its first ones.
        handed_over: all its keys, for a store that may lose them.
        is_announced: the request has ended, and its sending is to be reported.
        deadline: when nobody waits any longer for the next of its writes to end.
        is_given_up: that time came, and the sending was reported as failed.
    """

    pending: set[bytes] = field(default_factory=set)
    failed: set[bytes] = field(default_factory=set)
    num_bytes: int = 0
    promised: list[BlockKey] = field(default_factory=list)
    handed_over: list[BlockKey] = field(default_factory=list)
    is_announced: bool = False
    deadline: float = math.inf
    is_given_up: bool = False


@dataclass(frozen=True, slots=True)
class _StagedBlock:
    """A whole block in staging memory, and its draft if the store has one already."""

    key: BlockKey
    slot: int
    draft: DraftedBlock | None = None


class BlockSaver:
    """Copies out on the forward thread, writes on others, and knows whose sending has ended.

    Args:
        store: where blocks go. After a failure it is left alone for a while, and blocks are not even copied.
        block_format: puts the header in front.
        staging: bounded memory between the threads; a slot holds one block with its header.
        threads: run the writes.
        warnings: log lines for people.
        drafts: blocks that are saved layer by layer; None = all are saved after the forward pass.
        timeout_s: longest wait of one step for staging memory.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: BlockStore,
        block_format: BlockFormat,
        staging: StagingPool,
        threads: TaskThreads,
        warnings: WarningLimiter,
        *,
        drafts: StepDrafts | None = None,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._preparing_store = store if isinstance(store, PreparingStore) else None
        self._evicting_store = store if isinstance(store, EvictingStore) else None
        self._forgetful_store = store if isinstance(store, ForgetfulStore) else None
        self._format = block_format
        self._staging = staging
        self._threads = threads
        self._drafts = drafts
        self._backoff = Backoff(clock)
        self._congestion = Backoff(clock)
        self._warnings = warnings
        self._wake_engine: Callable[[], None] = lambda: None
        self._timeout_s = timeout_s
        self._clock = clock
        self._lock = threading.Lock()
        self._senders: dict[str, _Sender] = {}
        self._announced: dict[str, _Sender] = {}
        self._writing: dict[bytes, list[_Sender]] = {}
        self._queued: deque[_StagedBlock] = deque()
        self._num_unsubmitted = 0
        self._stats = ConnectorStats()

    def set_wake_up(self, wake: Callable[[], None]) -> None:
        """Called when a sending can be reported."""
        self._wake_engine = wake

    # --- forward thread -----------------------------------------------------------------------------------

    def begin_step(self, requests: Iterable[SaveRequest], memory: BlockMemory) -> None:
        """The step under way will save these blocks; what an earlier one began and did not save is dropped.

        It waits for nothing: a block that finds no room now is saved whole by `save`.
        """
        self._threads.help_here()  # with what earlier steps left
        if self._drafts is not None:
            self._drafts.drop()
        blocks = {block.digest: block for request in requests for block in request.blocks}
        if not blocks or self._get_pause() is not None:
            return
        if self._preparing_store is not None:
            self._threads.submit(self._preparing_store.prepare([block.key for block in blocks.values()]))
        if self._drafts is not None:
            with self._lock:
                wanted = [block for digest, block in blocks.items() if digest not in self._writing]
            self._drafts.begin((block for block in wanted if not self._store.has(block.key)), memory)

    @property
    def wants_layers(self) -> bool:
        """Whether `save_layer` has something to do in the step under way."""
        return bool(self._drafts)

    def save_layer(self, layer: int) -> None:
        """``layer`` of the step's blocks stands in KV memory."""
        if self._drafts is not None:
            self._drafts.save_layer(layer)

    def save(self, requests: Iterable[SaveRequest], memory: BlockMemory) -> None:
        """Take a copy of these blocks; when this returns, they may be overwritten."""
        deadline = self._clock() + self._timeout_s
        for request in requests:
            with self._lock:
                sender = self._senders.setdefault(request.request_id, _Sender())
            keys = [block.key for block in request.blocks]
            self._promise(sender, keys)
            if self._forgetful_store is not None:
                sender.handed_over += keys
            for block, key in zip(request.blocks, keys, strict=True):
                if not self._join_write(sender, block.digest):
                    self._save_block(sender, block, key, memory, deadline)
        self._hand_over(at_least=1)

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests ended and nobody waits for their sending; what was copied is still written."""
        with self._lock:
            ended = [self._senders.pop(request_id, None) for request_id in request_ids]
        self._release(sender for sender in ended if sender is not None)

    def take_report(self, finished_request_ids: Sequence[str]) -> ConnectorOutput:
        """What ended since the last call.

        Args:
            finished_request_ids: requests whose sending is to be reported from now on. One that is unknown or
                was reported already is refused and counted.
        """
        report = ConnectorOutput()
        with self._lock:
            for request_id in finished_request_ids:
                sender = self._senders.pop(request_id, None)
                if sender is None:
                    self._stats.count_failure("unknown")
                else:
                    self._announce(request_id, sender)
            self._give_up_late()
            ended = {
                request_id: sender
                for request_id, sender in self._announced.items()
                if not sender.pending or sender.is_given_up
            }
            for request_id, sender in ended.items():
                del self._announced[request_id]
                report.finished_sending.add(request_id)
                report.sent_bytes[request_id] = sender.num_bytes
                if sender.failed:
                    report.failed_sending.add(request_id)
            report.stats, self._stats = self._stats, ConnectorStats()
            is_awaited = bool(self._announced)
        if is_awaited:
            self._threads.help_here()
        self._release(ended.values())
        return report

    def _announce(self, request_id: str, sender: _Sender) -> None:
        sender.is_announced = True
        sender.deadline = self._clock() + _STUCK_AFTER_S
        self._announced[request_id] = sender
        if self._forgetful_store is not None:
            if not sender.pending:
                self._threads.submit(functools.partial(self._ask_for_all, sender))
            sender.pending.add(_QUESTION)

    def _give_up_late(self) -> None:
        """Whoever waits for a write that does not end is told that it failed; it may end whenever it likes."""
        now = self._clock()
        for sender in self._announced.values():
            if sender.pending and now >= sender.deadline:
                sender.is_given_up = True
                sender.failed |= sender.pending
                self._stats.count_failure("timeout")
                message = f"{self._store.place} has not ended a write for {_STUCK_AFTER_S:g} s: KV is not offered"
                self._warnings.warn("stuck", message)

    def _promise(self, sender: _Sender, keys: list[BlockKey]) -> None:
        if self._evicting_store is not None:
            self._evicting_store.promise(keys)
            sender.promised += keys

    def _release(self, senders: Iterable[_Sender]) -> None:
        if self._evicting_store is not None:
            for sender in senders:
                self._evicting_store.release(sender.promised)

    def _join_write(self, sender: _Sender, digest: bytes) -> bool:
        """Wait for a write of the same key that is under way; whether there is one."""
        with self._lock:
            waiting = self._writing.get(digest)
            if waiting is None:
                return False
            if digest not in sender.pending:
                waiting.append(sender)
                sender.pending.add(digest)
            return True

    def _save_block(
        self, sender: _Sender, block: BlockTransfer, key: BlockKey, memory: BlockMemory, deadline: float
    ) -> None:
        draft = self._drafts.take(block.digest) if self._drafts is not None else None
        if draft is not None:
            self._queue(sender, _StagedBlock(key, draft.slot, draft))
            return
        if self._store.has(key):
            sender.failed.discard(block.digest)
            return
        paused = self._get_pause()
        if paused is not None:
            self._drop(sender, block.digest, paused)
            return
        slot = self._acquire_slot(deadline)
        if slot is None:
            self._congestion.count_failure("timeout")
            self._warnings.warn("timeout", "KV is not saved: writing is too slow and the staging memory full")
            self._drop(sender, block.digest, "timeout")
            return
        self._congestion.count_success()
        memory.copy_out(block.block_id, block.num_tokens, self._staging.get_buffer(slot).data[HEADER_BYTES:])
        self._queue(sender, _StagedBlock(key, slot))
        self._hand_over(at_least=self._store.blocks_per_write)

    def _acquire_slot(self, deadline: float) -> int | None:
        """Staging memory for a block; who waits for it sees to it that the writers have all that is staged."""
        slot = self._staging.acquire(NO_WAIT)
        if slot is None:
            self._hand_over(at_least=1)
            slot = self._staging.acquire(deadline)
        return slot

    def _queue(self, sender: _Sender, staged: _StagedBlock) -> None:
        digest = staged.key.digest
        with self._lock:
            self._writing[digest] = [sender]
            sender.pending.add(digest)
            self._queued.append(staged)
        self._num_unsubmitted += 1

    def _hand_over(self, *, at_least: int) -> None:
        """Let the writers know of what is queued, if it is so much: waking them takes as long as copying a layer."""
        if self._num_unsubmitted >= at_least:
            num_batches = -(-self._num_unsubmitted // self._store.blocks_per_write)
            self._num_unsubmitted = 0
            self._threads.submit(*[self._write_some] * num_batches)

    def _get_pause(self) -> str | None:
        return self._backoff.get_reason() or self._congestion.get_reason()

    def _drop(self, sender: _Sender, digest: bytes, kind: str) -> None:
        with self._lock:
            sender.failed.add(digest)
            self._stats.count_failure(kind)

    def close(self) -> None:
        """Remove what was begun in the store; the writer threads have ended. Idempotent."""
        while self._queued:
            draft = self._queued.popleft().draft
            if draft is not None:
                draft.abandon()
        if self._drafts is not None:
            self._drafts.close()

    # --- writer threads -----------------------------------------------------------------------------------

    def _write_some(self) -> None:
        """Write what is queued, up to a batch; an earlier call may have taken it along."""
        with self._lock:
            batch = [self._queued.popleft() for _ in range(min(len(self._queued), self._store.blocks_per_write))]
        if not batch:
            return
        results: Sequence[WriteResult] = [WriteResult(Failure("io", "the writer failed"))] * len(batch)
        began = time.perf_counter()
        try:
            results = self._write(batch)
        finally:
            seconds = (time.perf_counter() - began) / len(batch)
            self._staging.release(*(staged.slot for staged in batch))
            self._settle(batch, results, seconds)

    def _write(self, batch: Sequence[_StagedBlock]) -> Sequence[WriteResult]:
        """Publish drafts, and write the others, and those whose draft came to nothing."""
        published = {staged.slot for staged in batch if staged.draft is not None and staged.draft.publish()}
        results = iter(self._write_whole([staged for staged in batch if staged.slot not in published]))
        return [WriteResult() if staged.slot in published else next(results) for staged in batch]

    def _write_whole(self, batch: Sequence[_StagedBlock]) -> Sequence[WriteResult]:
        paused = self._backoff.get_reason()
        if paused is not None:
            return [WriteResult(Failure(paused, "an earlier write failed"))] * len(batch)
        blocks = [SealedBlock(staged.key, self._staging.get_buffer(staged.slot).data) for staged in batch]
        for block in blocks:
            self._format.seal(block.key, block.value)
        results = self._store.write(blocks)
        for result in results:
            if result.failure is None:
                self._backoff.count_success()
            else:
                self._backoff.count_failure(result.failure.kind)
                self._warnings.warn(
                    result.failure.kind,
                    f"KV cannot be saved to {self._store.place}: {result.failure.reason}; will try again",
                )
        return results

    def _settle(self, batch: Sequence[_StagedBlock], results: Sequence[WriteResult], seconds: float) -> None:
        """Tell everybody who waits for these blocks; ``seconds`` were spent on each, besides its draft's."""
        with self._lock:
            settled: set[_Sender] = set()
            for staged, result in zip(batch, results, strict=True):
                senders = self._writing.pop(staged.key.digest)
                settled.update(senders)
                self._settle_block(staged, result, senders, seconds)
            has_end = any(sender.is_announced and not sender.pending for sender in settled)
            unsure = [sender for sender in settled if sender.pending == {_QUESTION} and not sender.is_given_up]
        if has_end:
            self._wake_engine()
        for sender in unsure:
            self._ask_for_all(sender)

    def _settle_block(
        self, staged: _StagedBlock, result: WriteResult, senders: Sequence[_Sender], seconds: float
    ) -> None:
        digest = staged.key.digest
        for sender in senders:
            sender.pending.discard(digest)
            sender.deadline = self._clock() + _STUCK_AFTER_S
            if sender.is_given_up:
                self._stats.count_failure("late")
            if result.failure is None:
                sender.failed.discard(digest)
            else:
                sender.failed.add(digest)
        if result.failure is not None:
            self._stats.count_failure(result.failure.kind)
        elif not result.was_there:
            num_bytes = self._format.payload_bytes
            senders[0].num_bytes += num_bytes
            self._stats.num_blocks_saved += 1
            self._stats.num_bytes_saved += num_bytes
            self._stats.save_seconds += seconds + (staged.draft.seconds if staged.draft is not None else 0.0)

    def _ask_for_all(self, sender: _Sender) -> None:
        """Whether the store still has what was written; what it has lost is not offered."""
        num_missing = num_blocks = len(sender.handed_over)
        try:
            if sender.failed or self._forgetful_store is None:
                num_missing = 0  # that a block is missing is known without asking
            else:
                num_missing = self._forgetful_store.count_missing(sender.handed_over)
        finally:
            with self._lock:
                sender.pending.discard(_QUESTION)
                if num_missing:
                    sender.failed.add(_QUESTION)
                    self._stats.count_failure("evicted")
            self._wake_engine()
        if num_missing:
            message = f"{self._store.place} has lost {num_missing} of a prompt's {num_blocks} blocks before its end"
            self._warnings.warn("evicted", f"{message}: KV is not offered; it may need more memory")
