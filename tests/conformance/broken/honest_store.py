"""An honest store in one process: small, without threads, and cut so that one method can be broken at a time.

Its medium is a dictionary of bytes that engines of one test share. Work is done a little with each step, so that
what happens between two steps is always the same.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch

from pdserve.connectors.base import (
    ConnectorContext,
    ConnectorFeatures,
    ConnectorOutput,
    FinishDecision,
    KVRequest,
    MatchResult,
    ScheduledTokens,
    StepPlan,
)
from pdserve.kv_layout import BlockKey, KVCacheSpec
from pdserve.protocol import KVTransferParams

HEADER = struct.Struct("<I16s32s")
BLOCKS_IN_PART = 8


@dataclass
class Medium:
    """What lasts: entries by name. While it is held, no stored entry is read."""

    entries: dict[str, bytes] = field(default_factory=dict)
    is_held: bool = False


MEDIA: dict[str, Medium] = {}


class Block(msgspec.Struct, frozen=True):
    name: str
    key: tuple[bytes, int]
    block_id: int

    @property
    def num_tokens(self) -> int:
        return self.key[1]


class Transfer(msgspec.Struct, frozen=True):
    request_id: str
    num_tokens: int
    blocks: list[Block]


class Metadata(msgspec.Struct, frozen=True):
    loads: list[Transfer] = []
    saves: list[Transfer] = []
    num_scheduled_tokens: int = 0


class StoreScheduler:
    def __init__(self, context: ConnectorContext, medium: Medium) -> None:
        self.context = context
        self.size = context.spec.block_size
        self.medium = medium
        self.loads: list[Transfer] = []
        self.num_saved: dict[str, int] = {}

    def name_of(self, key: BlockKey) -> str:
        return key.hex

    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> MatchResult:
        start, offset = divmod(num_computed_tokens, self.size)
        num_tokens = 0 if offset else self.count_run(request.block_keys[start:])
        return MatchResult(num_tokens, is_async=num_tokens > 0)

    def count_run(self, keys: Sequence[BlockKey]) -> int:
        num_tokens = 0
        for key in keys:
            if self.name_of(key) not in self.medium.entries:
                break
            num_tokens += key.num_tokens
        return num_tokens

    def update_state_after_alloc(
        self, request: KVRequest, block_ids: Sequence[int], num_computed_tokens: int, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            start = num_computed_tokens // self.size
            end = self.context.spec.num_blocks_for(num_computed_tokens + num_external_tokens)
            blocks = self.pair(request, block_ids, start, end)
            self.loads.append(Transfer(request.request_id, num_external_tokens, blocks))

    def build_connector_metadata(self, plan: StepPlan) -> Any:
        for request_id in plan.preempted_request_ids:
            self.num_saved[request_id] = 0
        num_scheduled = sum(item.num_scheduled_tokens for item in plan.scheduled)
        metadata = Metadata(self.loads, self.build_saves(plan.scheduled), num_scheduled)
        self.loads = []
        return metadata

    def build_saves(self, scheduled: Iterable[ScheduledTokens]) -> list[Transfer]:
        saves = []
        for item in scheduled:
            start, end = self.num_saved.get(item.request.request_id, 0), self.count_complete_blocks(item)
            if start < end:
                blocks = self.pair(item.request, item.block_ids, start, end)
                saves.append(Transfer(item.request.request_id, 0, blocks))
                self.num_saved[item.request.request_id] = end
        return saves

    def count_complete_blocks(self, item: ScheduledTokens) -> int:
        num_tokens = item.num_computed_tokens + item.num_scheduled_tokens
        if num_tokens >= item.request.num_prompt_tokens:
            return len(item.request.block_keys)
        return num_tokens // self.size

    def update_from_output(self, output: ConnectorOutput) -> None:
        pass

    def request_finished(
        self, request: KVRequest, block_ids: Sequence[int], num_computed_tokens: int, *, handoff: bool
    ) -> FinishDecision:
        self.num_saved.pop(request.request_id, None)
        if not handoff:
            return FinishDecision()
        transfer_id = f"{self.context.engine_id}:{request.request_id}"
        params = KVTransferParams(connector="honest", transfer_id=transfer_id, engine_id=self.context.engine_id)
        return FinishDecision(kv_transfer_params=params, announce_when_sent=True)

    def close(self) -> None:
        pass

    def pair(self, request: KVRequest, block_ids: Sequence[int], start: int, end: int) -> list[Block]:
        pairs = zip(request.block_keys[start:end], block_ids[start:end], strict=False)
        return [Block(self.name_of(key), (key.digest, key.num_tokens), block_id) for key, block_id in pairs]


@dataclass
class Part:
    blocks: list[Block]
    num_done: int = 0
    has_failed: bool = False

    @property
    def has_stopped(self) -> bool:
        return self.has_failed or self.num_done == len(self.blocks)


@dataclass
class Load:
    transfer: Transfer
    parts: list[Part]
    is_reported: bool = False

    def count_good_tokens(self) -> int:
        good = 0
        for part in self.parts:
            good += sum(block.num_tokens for block in part.blocks[: part.num_done])
            if part.has_failed or not part.has_stopped:
                break
        return min(good, self.transfer.num_tokens)


class StoreWorker:
    writes_a_step: ClassVar[int] = 4

    def __init__(self, context: ConnectorContext, medium: Medium) -> None:
        self.context = context
        self.spec = context.spec
        self.medium = medium
        self.step_saves: list[Transfer] = []
        self.loads: dict[str, Load] = self.make_load_table()
        self.writes: list[tuple[str, Block, bytes]] = []
        self.known: set[str] = set()
        self.announced: set[str] = set()

    def make_load_table(self) -> dict[str, Load]:
        return {}

    def register_kv_caches(self, kv_cache: torch.Tensor, spec: KVCacheSpec) -> None:
        rows: np.ndarray = kv_cache.reshape(kv_cache.shape[0], -1).view(torch.uint8).numpy()
        self.rows = rows

    def start_load_kv(self, metadata: Metadata) -> None:
        self.step_saves = metadata.saves
        for transfer in metadata.loads:
            self.start_load(transfer)

    def start_load(self, transfer: Transfer) -> None:
        if transfer.request_id not in self.loads:
            cuts = range(0, len(transfer.blocks), BLOCKS_IN_PART)
            parts = [Part(transfer.blocks[cut : cut + BLOCKS_IN_PART]) for cut in cuts]
            self.loads[transfer.request_id] = Load(transfer, parts)

    def wait_for_layer_load(self, layer: int) -> None:
        pass

    def save_kv_layer(self, layer: int) -> None:
        pass

    def wait_for_save(self) -> None:
        self.copy_out(self.step_saves)
        self.step_saves = []

    def copy_out(self, saves: Iterable[Transfer]) -> None:
        for transfer in saves:
            self.known.add(transfer.request_id)
            for block in transfer.blocks:
                self.writes.append((transfer.request_id, block, self.read_block(block)))

    def read_block(self, block: Block) -> bytes:
        """A block's bytes, zeros behind its tokens."""
        row = self.rows[block.block_id].copy()
        row.reshape(-1, self.spec.block_size, row.size // self._num_slots)[:, block.num_tokens :] = 0
        return row.tobytes()

    @property
    def _num_slots(self) -> int:
        return self.spec.num_layers * 2 * self.spec.num_kv_heads * self.spec.block_size

    def get_finished(self, finished_request_ids: Sequence[str]) -> ConnectorOutput:
        output = ConnectorOutput()
        self.announce(finished_request_ids)
        self.work()
        self.report_sends(output)
        self.report_loads(output)
        return output

    def announce(self, request_ids: Sequence[str]) -> None:
        self.announced.update(self.known.intersection(request_ids))
        self.known.difference_update(request_ids)

    def work(self) -> None:
        now, self.writes = self.writes[: self.writes_a_step], self.writes[self.writes_a_step :]
        for _, block, payload in now:
            self.write_entry(block, payload)
        for load in self.loads.values():
            for part in load.parts:
                if not part.has_stopped:
                    self.advance(part)

    def write_entry(self, block: Block, payload: bytes) -> None:
        self.medium.entries.setdefault(block.name, self.seal(block, payload))

    def advance(self, part: Part) -> None:
        """The next block of a part."""
        block = part.blocks[part.num_done]
        entry = self.medium.entries.get(block.name)
        if entry is not None and self.medium.is_held:
            return
        payload = None if entry is None else self.unseal(block, entry)
        if payload is None:
            self.medium.entries.pop(block.name, None)
            part.has_failed = True
            return
        self.put_block(block, payload)
        part.num_done += 1

    def put_block(self, block: Block, payload: bytes) -> None:
        self.rows[block.block_id] = np.frombuffer(payload, dtype=np.uint8)

    def seal(self, block: Block, payload: bytes) -> bytes:
        digest, num_tokens = block.key
        return HEADER.pack(num_tokens, digest, self.checksum(block, payload)) + payload

    def unseal(self, block: Block, entry: bytes) -> bytes | None:
        """The payload, or None when the entry is not what it should be."""
        payload = entry[HEADER.size :]
        digest, num_tokens = block.key
        header = HEADER.pack(num_tokens, digest, self.checksum(block, payload))
        return payload if entry[: HEADER.size] == header and len(payload) == self.spec.block_bytes else None

    def checksum(self, block: Block, payload: bytes) -> bytes:
        return hashlib.sha256(block.key[0] + payload).digest()

    def report_sends(self, output: ConnectorOutput) -> None:
        busy = {request_id for request_id, _, _ in self.writes}
        output.finished_sending = self.announced - busy
        self.announced &= busy

    def report_loads(self, output: ConnectorOutput) -> None:
        for request_id, load in list(self.loads.items()):
            if self.is_over(load) and not load.is_reported:
                self.report_load(output, request_id, load)
                self.forget_load(request_id)

    def is_over(self, load: Load) -> bool:
        return all(part.has_stopped for part in load.parts)

    def report_load(self, output: ConnectorOutput, request_id: str, load: Load) -> None:
        good = load.count_good_tokens()
        if good == load.transfer.num_tokens:
            output.finished_receiving.add(request_id)
        else:
            output.failed_receiving[request_id] = good

    def forget_load(self, request_id: str) -> None:
        del self.loads[request_id]

    def close(self) -> None:
        self.loads = {}


class HonestStore:
    features: ClassVar[ConnectorFeatures] = ConnectorFeatures(can_save=True, can_load=True, is_store=True)
    scheduler_type: ClassVar[type[StoreScheduler]] = StoreScheduler
    worker_type: ClassVar[type[StoreWorker]] = StoreWorker

    @classmethod
    def build_scheduler(cls, context: ConnectorContext) -> StoreScheduler:
        return cls.scheduler_type(context, MEDIA.setdefault(str(context.options["medium"]), Medium()))

    @classmethod
    def build_worker(cls, context: ConnectorContext) -> StoreWorker:
        return cls.worker_type(context, MEDIA.setdefault(str(context.options["medium"]), Medium()))
