"""Stores that break one rule each: `HonestStore` with one thing wrong."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from honest_store import (
    HEADER,
    Block,
    HonestStore,
    Load,
    Part,
    StoreScheduler,
    StoreWorker,
    Transfer,
)
from origins import ORIGINS

from pdserve.connectors.base import (
    ConnectorFeatures,
    ConnectorOutput,
    FinishDecision,
    KVRequest,
    MatchResult,
    StepPlan,
)
from pdserve.kv_layout import BlockKey

BROKEN: list[tuple[type[HonestStore], str]] = []


def breaks(
    rule: str, scheduler: type[StoreScheduler] = StoreScheduler, worker: type[StoreWorker] = StoreWorker
) -> None:
    """Register a store made of these halves."""
    BROKEN.append((compose(scheduler, worker), rule))


def compose(scheduler: type[StoreScheduler], worker: type[StoreWorker]) -> type[HonestStore]:
    """A store that is called as the half that is wrong."""
    name = (worker if scheduler is StoreScheduler else scheduler).__name__
    return type(name, (HonestStore,), {"scheduler_type": scheduler, "worker_type": worker})


# --- R1: counts are beyond local ------------------------------------------------------------------------------


class ReturnsTotals(StoreScheduler):
    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> MatchResult:
        match = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return MatchResult(match.num_tokens + num_computed_tokens, True) if match.num_tokens else match


class LoadsFromTheFirstBlock(StoreScheduler):
    def pair(self, request: KVRequest, block_ids: Sequence[int], start: int, end: int) -> list[Block]:
        is_load = request.request_id not in self.num_saved and start > 0
        blocks = super().pair(request, block_ids, start, end)
        if not is_load:
            return blocks
        return [Block(block.name, block.key, block_id) for block, block_id in zip(blocks, block_ids, strict=False)]


class CountsPastTheLocalEnd(StoreScheduler):
    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> MatchResult:
        if num_computed_tokens >= request.num_prompt_tokens:
            return MatchResult(self.size, is_async=True)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


breaks("R1", ReturnsTotals)
breaks("R1", LoadsFromTheFirstBlock)
breaks("R1", CountsPastTheLocalEnd)

# --- R2: whole-prompt hits work -------------------------------------------------------------------------------


class KeepsABlockBackOnAWholeHit(StoreScheduler):
    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> MatchResult:
        match = super().get_num_new_matched_tokens(request, num_computed_tokens)
        end = num_computed_tokens + (match.num_tokens or 0)
        if match.num_tokens and end == request.num_prompt_tokens and end % self.size == 0 and not num_computed_tokens:
            num_tokens = match.num_tokens - self.size
            return MatchResult(num_tokens, num_tokens > 0)
        return match


breaks("R2", KeepsABlockBackOnAWholeHit)

# --- R3: lookups are pure -------------------------------------------------------------------------------------


class RemembersTheLastLookup(StoreScheduler):
    last_local: ClassVar[dict[str, int]] = {}

    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> MatchResult:
        self.last_local[request.request_id] = num_computed_tokens
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: KVRequest, block_ids: Sequence[int], num_computed_tokens: int, num_external_tokens: int
    ) -> None:
        start = self.last_local.pop(request.request_id, num_computed_tokens)
        super().update_state_after_alloc(request, block_ids, start, num_external_tokens)


class PromisesALoadOfNothing(StoreScheduler):
    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> MatchResult:
        return MatchResult(super().get_num_new_matched_tokens(request, num_computed_tokens).num_tokens, is_async=True)


breaks("R3", RemembersTheLastLookup)
breaks("R3", PromisesALoadOfNothing)

# --- R4: promises are kept or reported ------------------------------------------------------------------------


class IgnoresHoles(StoreScheduler):
    def count_run(self, keys: Sequence[BlockKey]) -> int:
        return sum(key.num_tokens for key in keys if self.name_of(key) in self.medium.entries)


class SwallowsAMissingEntry(StoreWorker):
    def advance(self, part: Part) -> None:
        if part.blocks[part.num_done].name in self.medium.entries:
            super().advance(part)
        else:
            part.num_done += 1


class CountsAFailureAsWhole(StoreWorker):
    def report_load(self, output: ConnectorOutput, request_id: str, load: Load) -> None:
        super().report_load(output, request_id, load)
        if request_id in output.failed_receiving:
            output.failed_receiving[request_id] = load.transfer.num_tokens


breaks("R4", IgnoresHoles)
breaks("R4", worker=SwallowsAMissingEntry)
breaks("R4", worker=CountsAFailureAsWhole)

# --- R5: partial blocks ---------------------------------------------------------------------------------------


class ClaimsWholeBlocks(StoreScheduler):
    def count_run(self, keys: Sequence[BlockKey]) -> int:
        num_tokens = super().count_run(keys)
        return -(-num_tokens // self.size) * self.size


breaks("R5", ClaimsWholeBlocks)

# --- R6: every chunk is saved ---------------------------------------------------------------------------------


class SavesTheFirstChunkOnly(StoreScheduler):
    def build_connector_metadata(self, plan: StepPlan) -> Any:
        known = dict(self.num_saved)
        metadata = super().build_connector_metadata(plan)
        for transfer in list(metadata.saves):
            if known.get(transfer.request_id):
                metadata.saves.remove(transfer)
        return metadata


class SavesOnlyWhatItComputed(StoreScheduler):
    def build_connector_metadata(self, plan: StepPlan) -> Any:
        for item in plan.scheduled:
            self.num_saved.setdefault(item.request.request_id, item.num_computed_tokens // self.size)
        return super().build_connector_metadata(plan)


class ForgetsTheTailOfAChunk(StoreScheduler):
    """Counts whole blocks of each chunk by itself: chunks that end inside a block lose it."""

    def count_complete_blocks(self, item: Any) -> int:
        if item.num_computed_tokens % self.size:
            return self.num_saved.get(item.request.request_id, 0)
        return super().count_complete_blocks(item)


breaks("R6", SavesTheFirstChunkOnly)
breaks("R6", SavesOnlyWhatItComputed)
breaks("R6", ForgetsTheTailOfAChunk)

# --- R7: nothing uncomputed -----------------------------------------------------------------------------------


class SavesBeforeTheForwardPass(StoreWorker):
    def start_load_kv(self, metadata: Any) -> None:
        super().start_load_kv(metadata)
        self.copy_out(self.step_saves)
        self.step_saves = []


class SavesAFailedStepLater(StoreWorker):
    def start_load_kv(self, metadata: Any) -> None:
        unsaved = self.step_saves
        super().start_load_kv(metadata)
        self.step_saves = [*unsaved, *self.step_saves]


breaks("R7", worker=SavesBeforeTheForwardPass)
breaks("R7", worker=SavesAFailedStepLater)

# --- R8: preemption is fenced ---------------------------------------------------------------------------------


class CopiesInTheNextStep(StoreWorker):
    def wait_for_save(self) -> None:
        for transfer in self.step_saves:
            self.known.add(transfer.request_id)
            self.writes += [(transfer.request_id, block, b"") for block in transfer.blocks]
        self.step_saves = []

    def work(self) -> None:
        due = [write for write in self.writes if write[1] in getattr(self, "seen", ())]
        self.seen = {write[1] for write in self.writes}
        fresh = [write for write in self.writes if write not in due]
        self.writes = [(request_id, block, self.read_block(block)) for request_id, block, _ in due]
        super().work()
        self.writes += fresh


breaks("R8", worker=CopiesInTheNextStep)

# --- R9: one completion for each load -------------------------------------------------------------------------


class ReportsLoadsTwice(StoreWorker):
    def forget_load(self, request_id: str) -> None:
        load = self.loads.pop(request_id)
        if request_id in getattr(self, "again", set()):
            return
        self.again = {*getattr(self, "again", set()), request_id}
        self.loads[request_id] = load


class ForgetsAbortedLoads(StoreScheduler):
    def request_finished(
        self, request: KVRequest, block_ids: Sequence[int], num_computed_tokens: int, *, handoff: bool
    ) -> FinishDecision:
        self.loads = [load for load in self.loads if load.request_id != request.request_id]
        return super().request_finished(request, block_ids, num_computed_tokens, handoff=handoff)


class RaisesOnUnknownIds(StoreWorker):
    def announce(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self.known.remove(request_id)
            self.announced.add(request_id)


class ReportsUnknownIds(StoreWorker):
    def announce(self, request_ids: Sequence[str]) -> None:
        self.announced.update(request_ids)


class StartsLoadsAgain(StoreWorker):
    """A message that comes twice starts its loads twice, and both are reported."""

    def start_load_kv(self, metadata: Any) -> None:
        super().start_load_kv(metadata)
        self.extra = [*getattr(self, "extra", []), *(load.request_id for load in metadata.loads)]

    def report_loads(self, output: ConnectorOutput) -> None:
        super().report_loads(output)
        again = [name for name in set(self.extra) if self.extra.count(name) > 1 and name not in self.loads]
        for request_id in again:
            if request_id not in output.finished_receiving:
                output.finished_receiving.add(request_id)
                self.extra.remove(request_id)


breaks("R9", worker=ReportsLoadsTwice)
breaks("R9", ForgetsAbortedLoads)
breaks("R9", worker=RaisesOnUnknownIds)
breaks("R9", worker=ReportsUnknownIds)
breaks("R9", worker=StartsLoadsAgain)


class LosesLoadsOfAFullPool(StoreWorker):
    """Never reports a load of more than two parts."""

    def is_over(self, load: Load) -> bool:
        return len(load.parts) <= 2 and super().is_over(load)


breaks("R9", worker=LosesLoadsOfAFullPool)

# --- R10: one completion for each send ------------------------------------------------------------------------


class SilentWhenAllIsStored(StoreWorker):
    def copy_out(self, saves: Any) -> None:
        missing = [
            Transfer(save.request_id, 0, [block for block in save.blocks if block.name not in self.medium.entries])
            for save in saves
        ]
        super().copy_out(save for save in missing if save.blocks)


class ReportsSendsTwice(StoreWorker):
    def report_sends(self, output: ConnectorOutput) -> None:
        super().report_sends(output)
        before, self.before = getattr(self, "before", set()), set(output.finished_sending)
        output.finished_sending |= before


class ReportsSendsTooEarly(StoreWorker):
    def report_sends(self, output: ConnectorOutput) -> None:
        output.finished_sending, self.announced = self.announced, set()


class ReportsPhantomSends(StoreWorker):
    def copy_out(self, saves: Any) -> None:
        super().copy_out(saves)
        self.phantoms = {block[0] for block in self.writes}

    def report_sends(self, output: ConnectorOutput) -> None:
        super().report_sends(output)
        output.finished_sending |= getattr(self, "phantoms", set())
        self.phantoms = set()


breaks("R10", worker=SilentWhenAllIsStored)
breaks("R10", worker=ReportsSendsTwice)
breaks("R10", worker=ReportsSendsTooEarly)
breaks("R10", worker=ReportsPhantomSends)

# --- R11: failures wait for all parts -------------------------------------------------------------------------


class ReportsTheFirstFailure(StoreWorker):
    """Tells of a failed part at once, while the others go on writing."""

    def is_over(self, load: Load) -> bool:
        return super().is_over(load) or any(part.has_failed for part in load.parts)

    def report_loads(self, output: ConnectorOutput) -> None:
        super().report_loads(output)
        for load in getattr(self, "zombies", []):
            for part in load.parts:
                if not part.has_stopped:
                    self.advance(part)

    def forget_load(self, request_id: str) -> None:
        self.zombies = [*getattr(self, "zombies", []), self.loads.pop(request_id)]


breaks("R11", worker=ReportsTheFirstFailure)

# --- R13, R14: shapes and identity ----------------------------------------------------------------------------


class OwnIdentity(StoreScheduler):
    """Names entries by what a derived class takes into account."""

    parts: ClassVar[tuple[str, ...]] = ("weights", "heads", "dtype", "block_size", "shape", "salt", "adapter")

    def name_of(self, key: BlockKey) -> str:
        origin, identity, spec = ORIGINS[key.digest], self.context.identity, self.context.spec
        values = {
            "weights": identity.weights,
            "heads": spec.num_kv_heads,
            "dtype": spec.dtype,
            "block_size": spec.block_size,
            "shape": (spec.num_layers, spec.head_dim, spec.layout_version),
            "salt": origin.cache_salt,
            "adapter": origin.adapter,
        }
        chosen = [values[part] for part in self.parts]
        return hashlib.sha256(repr((chosen, origin.token_ids)).encode()).hexdigest()


class AnyShape(StoreWorker):
    """Takes what an entry has, whatever its size; names are all the identity there is."""

    def unseal(self, block: Block, entry: bytes) -> bytes | None:
        payload = entry[HEADER.size :]
        if entry[: HEADER.size] != HEADER.pack(0, bytes(16), hashlib.sha256(payload).digest()):
            return None
        return payload

    def seal(self, block: Block, payload: bytes) -> bytes:
        return HEADER.pack(0, bytes(16), hashlib.sha256(payload).digest()) + payload

    def put_block(self, block: Block, payload: bytes) -> None:
        row = self.rows[block.block_id]
        size = min(len(row), len(payload))
        row[:size] = np.frombuffer(payload[:size], dtype=np.uint8)


def forgets(part: str, rule: str) -> None:
    """Register a store whose names lack one part of the identity."""
    kept = tuple(name for name in OwnIdentity.parts if name != part)
    scheduler = type(f"Forgets_{part}", (OwnIdentity,), {"parts": kept})
    breaks(rule, scheduler, AnyShape)


for forgotten in ("weights", "dtype", "block_size", "shape", "salt", "adapter"):
    forgets(forgotten, "R14")
forgets("heads", "R13")


class TakesAnyVersion(StoreWorker):
    """Reads what another version of it has written as if it were its own."""

    def unseal(self, block: Block, entry: bytes) -> bytes | None:
        return super().unseal(block, entry[:2] + b"\0" + entry[3:])


breaks("R14", worker=TakesAnyVersion)

# --- R15: only the prompt travels -----------------------------------------------------------------------------


class SavesTheWholeLastBlock(StoreWorker):
    def read_block(self, block: Block) -> bytes:
        return self.rows[block.block_id].tobytes()


breaks("R15", worker=SavesTheWholeLastBlock)

# --- R16: transfer ids are unique -----------------------------------------------------------------------------


class RequestIdsAsTransferIds(StoreScheduler):
    def request_finished(
        self, request: KVRequest, block_ids: Sequence[int], num_computed_tokens: int, *, handoff: bool
    ) -> FinishDecision:
        decision = super().request_finished(request, block_ids, num_computed_tokens, handoff=handoff)
        params = decision.kv_transfer_params
        if params is None:
            return decision
        renamed = type(params)(connector=params.connector, transfer_id=request.request_id, engine_id=params.engine_id)
        return FinishDecision(kv_transfer_params=renamed, announce_when_sent=True)


breaks("R16", RequestIdsAsTransferIds)

# --- R20: transfers progress when idle ------------------------------------------------------------------------


class WorksOnlyInStepsWithTokens(StoreWorker):
    def start_load_kv(self, metadata: Any) -> None:
        super().start_load_kv(metadata)
        self.has_tokens = metadata.num_scheduled_tokens > 0

    def work(self) -> None:
        if self.has_tokens:
            super().work()


breaks("R20", worker=WorksOnlyInStepsWithTokens)


# --- what is not declared ---------------------------------------------------------------------------------------


class UndeclaredStore(HonestStore):
    """Works, but declares neither saving nor loading: a warning, no failure."""

    features: ClassVar[ConnectorFeatures] = ConnectorFeatures()
