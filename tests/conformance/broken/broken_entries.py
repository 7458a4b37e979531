"""Stores that break R19, R21 or R22: what they leave behind, what lies in them, what they say."""

from __future__ import annotations

import hashlib
import os
import pickle
import weakref
from collections.abc import Sequence
from typing import Any

from broken_stores import compose
from honest_store import (
    HEADER,
    Block,
    HonestStore,
    Medium,
    Part,
    StoreScheduler,
    StoreWorker,
    Transfer,
)
from origins import ORIGINS

from pdserve.connectors.base import (
    ConnectorContext,
    ConnectorOutput,
    FinishDecision,
    KVRequest,
    StepPlan,
)

BROKEN: list[tuple[type[HonestStore], str]] = []


def breaks(
    rule: str, scheduler: type[StoreScheduler] = StoreScheduler, worker: type[StoreWorker] = StoreWorker
) -> None:
    """Register a store made of these halves."""
    BROKEN.append((compose(scheduler, worker), rule))


# --- R19: restarts ---------------------------------------------------------------------------------------------


class LeavesFilesOpen(StoreWorker):
    """A file for each engine, open until the test's end."""

    def __init__(self, context: ConnectorContext, medium: Medium) -> None:
        super().__init__(context, medium)
        weakref.finalize(medium, os.close, os.open(os.devnull, os.O_RDONLY))


breaks("R19", worker=LeavesFilesOpen)


# --- R21: stored blocks are whole -----------------------------------------------------------------------------


class NoChecksum(StoreWorker):
    def checksum(self, block: Block, payload: bytes) -> bytes:
        return block.key[0] * 2


class NoKeyInTheEntry(StoreWorker):
    """Its checksum covers the bytes, not whose they are."""

    def checksum(self, block: Block, payload: bytes) -> bytes:
        return hashlib.sha256(payload).digest()

    def seal(self, block: Block, payload: bytes) -> bytes:
        return HEADER.pack(block.num_tokens, bytes(16), self.checksum(block, payload)) + payload

    def unseal(self, block: Block, entry: bytes) -> bytes | None:
        payload = entry[HEADER.size :]
        header = HEADER.pack(block.num_tokens, bytes(16), self.checksum(block, payload))
        return payload if entry[: HEADER.size] == header and len(payload) == self.spec.block_bytes else None


class PadsShortEntries(StoreWorker):
    def unseal(self, block: Block, entry: bytes) -> bytes | None:
        whole = HEADER.size + self.spec.block_bytes
        if HEADER.size <= len(entry) < whole:
            return entry[HEADER.size :].ljust(self.spec.block_bytes, b"\0")
        return super().unseal(block, entry)


class WritesInPlace(StoreWorker):
    """Half of an entry in one step, the other half in the next."""

    def write_entry(self, block: Block, payload: bytes) -> None:
        if block.name in self.medium.entries:
            return
        entry = self.seal(block, payload)
        half = len(entry) // 2
        self.medium.entries[block.name] = entry[:half]
        self.rest = {**getattr(self, "rest", {}), block.name: entry}

    def work(self) -> None:
        rest, self.rest = getattr(self, "rest", {}), {}
        self.medium.entries.update(rest)
        super().work()

    def report_sends(self, output: ConnectorOutput) -> None:
        if not self.rest:
            super().report_sends(output)


class NeverReplacesDamage(StoreWorker):
    """An entry that was found damaged stays, and is never written again."""

    def advance(self, part: Part) -> None:
        name = part.blocks[part.num_done].name
        entry = self.medium.entries.get(name)
        super().advance(part)
        if entry is not None and part.has_failed:
            self.medium.entries[name] = entry


breaks("R21", worker=NoChecksum)
breaks("R21", worker=NoKeyInTheEntry)
breaks("R21", worker=PadsShortEntries)
breaks("R21", worker=WritesInPlace)
breaks("R21", worker=NeverReplacesDamage)

# --- R22: plain, bounded data ---------------------------------------------------------------------------------


class SendsObjects(StoreScheduler):
    def build_connector_metadata(self, plan: StepPlan) -> Any:
        metadata = super().build_connector_metadata(plan)
        metadata.loads.append(Transfer("none", 0, []))
        return ObjectMetadata(metadata)


class ObjectMetadata:
    def __init__(self, metadata: Any) -> None:
        self.saves = metadata.saves
        self.loads = metadata.loads[:-1]
        self.num_scheduled_tokens = metadata.num_scheduled_tokens


class PicklesEntries(StoreWorker):
    def seal(self, block: Block, payload: bytes) -> bytes:
        return pickle.dumps(super().seal(block, payload))

    def unseal(self, block: Block, entry: bytes) -> bytes | None:
        inner = bytes(self.spec.block_bytes + HEADER.size)
        example = pickle.dumps(inner)
        start = len(example) - len(inner) - 2
        if len(entry) != len(example) or entry[:start] != example[:start] or entry[-2:] != example[-2:]:
            return None
        return super().unseal(block, pickle.loads(entry))


class PutsTheTokensIntoTheParameters(StoreScheduler):
    def request_finished(
        self, request: KVRequest, block_ids: Sequence[int], num_computed_tokens: int, *, handoff: bool
    ) -> FinishDecision:
        decision = super().request_finished(request, block_ids, num_computed_tokens, handoff=handoff)
        params = decision.kv_transfer_params
        if params is None:
            return decision
        bulky = type(params)(
            connector=params.connector,
            transfer_id=params.transfer_id,
            engine_id=params.engine_id,
            payload={"tokens": [repr(ORIGINS[key.digest]) for key in request.block_keys]},
        )
        return FinishDecision(kv_transfer_params=bulky, announce_when_sent=True)


breaks("R22", SendsObjects)
breaks("R22", worker=PicklesEntries)
breaks("R22", PutsTheTokensIntoTheParameters)
