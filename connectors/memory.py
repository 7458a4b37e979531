"""KV between engines of one process, through a dictionary: the smallest connector that keeps every rule.

Written to be read: docs/connectors/memory.md walks through it. The engines share a dictionary that whoever builds them
hands to each as option ``store``. Nothing runs beside the steps: a load is done in the step that asks for it and
reported at its end, and what a step computes is saved before it ends. It never evicts: for tests and small services.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pdserve.connectors.base import (
    ConnectorContext,
    ConnectorFeatures,
    ConnectorOutput,
    FinishDecision,
    KVRequest,
    MatchResult,
    StepPlan,
)
from pdserve.connectors.blocks.block_format import HEADER_BYTES, BlockFormat
from pdserve.connectors.blocks.failures import InvalidBlockError
from pdserve.connectors.blocks.messages import BlockTransfer, LoadRequest, SaveRequest, StepMetadata, pair_blocks
from pdserve.connectors.messages import MessageTypes
from pdserve.connectors.null import NullScheduler, NullWorker
from pdserve.errors import ConfigError
from pdserve.kv_layout import KVCacheSpec, Rank
from pdserve.protocol import KVTransferParams, Role

if TYPE_CHECKING:
    import torch

Store = dict[bytes, bytes]
"""Sealed blocks (header, checksum, payload); each rank's share of a block by a name of its own."""


def get_name(digest: bytes, rank: Rank) -> bytes:
    """What a rank's share of a block is called in the store."""
    return digest + rank.label.encode()


class MemoryScheduler(NullScheduler):
    """The half beside the scheduler: counts and block ids only."""

    def __init__(self, context: ConnectorContext, store: Store) -> None:
        self._context = context
        self._ranks = context.rank.all_ranks
        self._store = store
        self._loads: list[LoadRequest] = []

    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> MatchResult:
        """Tokens of the stored blocks that follow the local ones without a gap; changes nothing."""
        start, offset = divmod(num_computed_tokens, self._context.spec.block_size)
        num_tokens = 0
        # Inside a block there is nothing to offer: its first tokens are the engine's own, and perhaps shared.
        for key in request.block_keys[start:] if offset == 0 else ():
            if not all(get_name(key.digest, rank) in self._store for rank in self._ranks):
                break
            num_tokens += key.num_tokens
        return MatchResult(num_tokens, is_async=num_tokens > 0)

    def update_state_after_alloc(
        self, request: KVRequest, block_ids: Sequence[int], num_computed_tokens: int, num_external_tokens: int
    ) -> None:
        """The engine counts on these tokens: note which blocks to fill."""
        if num_external_tokens > 0:
            start = num_computed_tokens // self._context.spec.block_size
            end = self._context.spec.num_blocks_for(num_computed_tokens + num_external_tokens)
            blocks = pair_blocks(request, block_ids, start, end)
            self._loads.append(LoadRequest(request.request_id, num_external_tokens, blocks))

    def build_connector_metadata(self, plan: StepPlan) -> StepMetadata:
        """What to load before this step's forward pass, and which prompt blocks are whole after it."""
        metadata = StepMetadata(loads=self._loads, saves=[])
        self._loads = []
        for item in plan.scheduled if self._context.role is Role.PREFILL else ():
            request = item.request
            if item.num_computed_tokens < request.num_prompt_tokens:
                num_tokens = item.num_computed_tokens + item.num_scheduled_tokens
                # The prompt's last block may be partial; it is whole when the prompt is.
                is_last = num_tokens >= request.num_prompt_tokens
                end = len(request.block_keys) if is_last else num_tokens // self._context.spec.block_size
                blocks = pair_blocks(request, item.block_ids, 0, end)
                metadata.saves.append(SaveRequest(request.request_id, blocks))
        return metadata

    def request_finished(
        self, request: KVRequest, block_ids: Sequence[int], num_computed_tokens: int, *, handoff: bool
    ) -> FinishDecision:
        """What the request computed was saved with its steps: its blocks are free, and a consumer may come."""
        if not handoff or self._context.role is not Role.PREFILL:
            return FinishDecision()
        transfer_id = f"{self._context.engine_id}:{request.request_id}"
        params = KVTransferParams(connector="memory", transfer_id=transfer_id, num_tokens=request.num_prompt_tokens)
        return FinishDecision(kv_transfer_params=params)


class MemoryWorker(NullWorker):
    """The half beside the model runner: moves the bytes."""

    def __init__(self, context: ConnectorContext, store: Store) -> None:
        self._format = BlockFormat(context.identity, context.spec, context.rank)
        self._rank = context.rank
        self._store = store
        self._saves: list[SaveRequest] = []
        self._report = ConnectorOutput()

    def register_kv_caches(self, kv_cache: torch.Tensor, spec: KVCacheSpec) -> None:
        """Take the memory that blocks lie in."""
        from pdserve.connectors.blocks.block_memory import BlockMemory  # torch: not where the scheduler half lives

        self._memory = BlockMemory(kv_cache, spec, "memory")

    def start_load_kv(self, metadata: StepMetadata) -> None:
        """Fill blocks up to the first that cannot be filled; the engine computes from there on."""
        self._saves = metadata.saves
        for load in metadata.loads:
            num_tokens = 0
            for block in load.blocks:
                failure = self._load(block)
                if failure is not None:
                    self._report.stats.count_failure(failure)
                    break
                num_tokens += block.num_tokens
            if num_tokens >= load.num_tokens:
                self._report.finished_receiving.add(load.request_id)
            else:
                self._report.failed_receiving[load.request_id] = num_tokens

    def wait_for_save(self) -> None:
        """Copy the step's whole blocks; when this returns, the engine may do with them what it likes."""
        saves, self._saves = self._saves, []
        for block in (block for save in saves for block in save.blocks):
            name = get_name(block.digest, self._rank)
            if name not in self._store:
                value = bytearray(self._format.value_bytes)
                self._memory.copy_out(block.block_id, block.num_tokens, memoryview(value)[HEADER_BYTES:])
                self._format.seal(block.key, memoryview(value))
                self._store[name] = bytes(value)
                self._report.stats.num_blocks_saved += 1
                self._report.stats.num_bytes_saved += self._format.payload_bytes

    def get_finished(self, finished_request_ids: Sequence[str]) -> ConnectorOutput:
        """What ended since the last call. No report of a sending was promised, so who asks for one is refused."""
        report, self._report = self._report, ConnectorOutput()
        for _ in finished_request_ids:
            report.stats.count_failure("unknown")
        return report

    def _load(self, block: BlockTransfer) -> str | None:
        """Verify, then copy: unverified bytes never touch KV memory. The kind of the failure, or None."""
        name = get_name(block.digest, self._rank)
        value = self._store.get(name)
        if value is None:
            return "missing"
        header, payload = value[:HEADER_BYTES], memoryview(value)[HEADER_BYTES:]
        try:
            self._format.verify_header(block.key, header, len(value))
            self._format.verify_payload(header, payload)
        except InvalidBlockError as error:
            self._store.pop(name, None)
            return error.kind
        self._memory.get_view(block.block_id)[:] = payload
        self._report.stats.num_blocks_loaded += 1
        self._report.stats.num_bytes_loaded += len(payload)
        return None


class MemoryConnector:
    """Builds the two halves."""

    features: ClassVar[ConnectorFeatures] = ConnectorFeatures(can_save=True, can_load=True, is_store=True, ranks=True)

    @classmethod
    def build_scheduler(cls, context: ConnectorContext) -> MemoryScheduler:
        """The scheduler half; ConfigError without a store."""
        return MemoryScheduler(context, _get_store(context))

    @classmethod
    def build_worker(cls, context: ConnectorContext) -> MemoryWorker:
        """The worker half; ConfigError without a store."""
        return MemoryWorker(context, _get_store(context))

    @classmethod
    def message_types(cls, options: Mapping[str, Any]) -> MessageTypes:
        """The same whatever the options: the worker halves say nothing of their own."""
        return MessageTypes(metadata=StepMetadata)


def _get_store(context: ConnectorContext) -> Store:
    store = context.options.get("store")
    if len(context.options) != 1 or not isinstance(store, dict):
        raise ConfigError(
            "connector memory takes one option, store: a dictionary that engines of one process share; "
            "between processes use shared_storage"
        )
    return store
