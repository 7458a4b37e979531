"""The two halves: what the database holds for a request, and the bytes between it and KV memory.

Simple on purpose: reads and writes happen on the engine's own thread, inside the step. A connector for a slow medium
does them on threads of its own and reports their end in a later step; nothing else would change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pdserve.connectors import (
    BlockKey,
    ConfigError,
    ConnectorContext,
    ConnectorFeatures,
    ConnectorOutput,
    FinishDecision,
    KVCacheSpec,
    KVRequest,
    KVTransferParams,
    MatchResult,
    Role,
    StepPlan,
)
from pdserve_sqlite.database import BlockTable

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Transfer:
    """Blocks of one request: where each lies in KV memory. A count of tokens makes it a load."""

    request_id: str
    blocks: list[tuple[bytes, int, int]]  # digest, tokens, block id
    num_tokens: int = 0


@dataclass(frozen=True)
class StepMessage:
    """From the scheduler half to the worker half: plain data."""

    loads: list[Transfer] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)


class SqliteScheduler:
    """Beside the scheduler: counts, block ids and keys."""

    def __init__(self, context: ConnectorContext, table: BlockTable) -> None:
        self._context = context
        self._size = context.spec.block_size
        self._table = table
        self._loads: list[Transfer] = []
        self._num_saved: dict[str, int] = {}

    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> MatchResult:
        """Tokens of the longest run of stored blocks behind the local ones."""
        start, offset = divmod(num_computed_tokens, self._size)
        if offset:
            return MatchResult(0)  # a load would write to a block whose first tokens are the engine's own
        num_tokens = 0
        for key in request.block_keys[start:]:
            if not self._table.has(key):
                break
            num_tokens += key.num_tokens
        return MatchResult(num_tokens, is_async=num_tokens > 0)

    def update_state_after_alloc(
        self, request: KVRequest, block_ids: Sequence[int], num_computed_tokens: int, num_external_tokens: int
    ) -> None:
        """Note the load."""
        if num_external_tokens:
            start = num_computed_tokens // self._size
            end = self._context.spec.num_blocks_for(num_computed_tokens + num_external_tokens)
            blocks = _pair(request, block_ids, start, end)
            self._loads.append(Transfer(request.request_id, blocks, num_external_tokens))

    def build_connector_metadata(self, plan: StepPlan) -> StepMessage:
        """The loads noted since the last step, and the prompt blocks that are whole after this one."""
        for request_id in plan.preempted_request_ids:
            if request_id in self._num_saved:
                self._num_saved[request_id] = 0
        message = StepMessage(loads=self._loads)
        self._loads = []
        if self._context.role is Role.PREFILL:
            for item in plan.scheduled:
                request_id = item.request.request_id
                start = self._num_saved.get(request_id, 0)
                end = self._count_whole_blocks(item.request, item.num_computed_tokens + item.num_scheduled_tokens)
                if start < end:
                    message.saves.append(Transfer(request_id, _pair(item.request, item.block_ids, start, end)))
                    self._num_saved[request_id] = end
        return message

    def update_from_output(self, output: ConnectorOutput) -> None:
        """Nothing to remember."""

    def request_finished(
        self, request: KVRequest, block_ids: Sequence[int], num_computed_tokens: int, *, handoff: bool
    ) -> FinishDecision:
        """What was computed was stored with its step, so the blocks are free; the worker tells if all of it was."""
        if self._num_saved.pop(request.request_id, None) is None or not handoff:
            return FinishDecision()
        params = KVTransferParams(
            connector="sqlite",
            transfer_id=f"{self._context.engine_id}:{request.request_id}",
            engine_id=self._context.engine_id,
            num_tokens=request.num_prompt_tokens,
        )
        return FinishDecision(kv_transfer_params=params, announce_when_sent=True)

    def close(self) -> None:
        """Let go of the database."""
        self._table.close()

    def _count_whole_blocks(self, request: KVRequest, num_tokens: int) -> int:
        """The prompt's last block may be partial; it is whole when the prompt is."""
        return len(request.block_keys) if num_tokens >= request.num_prompt_tokens else num_tokens // self._size


class SqliteWorker:
    """Beside the model runner: moves bytes."""

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._saves: list[Transfer] = []
        self._is_whole: dict[str, bool] = {}
        self._report = ConnectorOutput()

    def register_kv_caches(self, kv_cache: torch.Tensor, spec: KVCacheSpec) -> None:
        """See the memory as bytes: ``[B, L·2·K, S, bytes of a head's slot]``."""
        import torch

        rows = kv_cache.view(torch.uint8).numpy()
        self._blocks: np.ndarray[Any, np.dtype[np.uint8]] = rows.reshape(
            rows.shape[0], -1, spec.block_size, rows.shape[-1]
        )

    def start_load_kv(self, metadata: StepMessage) -> None:
        """Fill blocks up to the first that cannot be filled; say how many tokens are good."""
        self._saves = metadata.saves
        for load in metadata.loads:
            num_good = 0
            for digest, num_tokens, block_id in load.blocks:
                payload = self._table.read(BlockKey(digest, num_tokens))
                if payload is None:
                    self._report.stats.count_failure("missing")
                    break
                block = self._blocks[block_id]
                block[:] = np.frombuffer(payload, dtype=np.uint8).reshape(block.shape)
                num_good += num_tokens
                self._report.stats.num_blocks_loaded += 1
                self._report.stats.num_bytes_loaded += len(payload)
            if num_good >= load.num_tokens:
                self._report.finished_receiving.add(load.request_id)
            else:
                self._report.failed_receiving[load.request_id] = num_good

    def wait_for_layer_load(self, layer: int) -> None:
        """Blocks are moved whole."""

    def save_kv_layer(self, layer: int) -> None:
        """Blocks are moved whole."""

    def wait_for_save(self) -> None:
        """Store the step's whole blocks; a request that lost one is not tried further: every try may take a moment."""
        saves, self._saves = self._saves, []
        for save in saves:
            is_whole = self._is_whole.get(save.request_id, True)
            self._is_whole[save.request_id] = is_whole and all(self._store(*block) for block in save.blocks)

    def get_finished(self, finished_request_ids: Sequence[str]) -> ConnectorOutput:
        """What ended since the last call; ids that are unknown, or come again, are refused."""
        report, self._report = self._report, ConnectorOutput()
        for request_id in finished_request_ids:
            is_whole = self._is_whole.pop(request_id, None)
            if is_whole is None:
                report.stats.count_failure("unknown")
                continue
            report.finished_sending.add(request_id)
            if not is_whole:
                report.failed_sending.add(request_id)
        return report

    def close(self) -> None:
        """Let go of the database."""
        self._table.close()

    def _store(self, digest: bytes, num_tokens: int, block_id: int) -> bool:
        """Store one block unless it is there, with zeros in the slots behind a partial block's tokens."""
        key = BlockKey(digest, num_tokens)
        if self._table.has(key):
            return True
        block = self._blocks[block_id].copy()
        block[:, num_tokens:] = 0
        if not self._table.write(key, block.tobytes()):
            self._report.stats.count_failure("io")
            return False
        self._report.stats.num_blocks_saved += 1
        self._report.stats.num_bytes_saved += block.nbytes
        return True


class SqliteConnector:
    """Builds the two halves. Option ``path`` names the database; every engine that shares KV names the same one."""

    features: ClassVar[ConnectorFeatures] = ConnectorFeatures(can_save=True, can_load=True, is_store=True)

    @classmethod
    def build_scheduler(cls, context: ConnectorContext) -> SqliteScheduler:
        """The scheduler half; ConfigError when an option is wrong."""
        return SqliteScheduler(context, BlockTable(_get_path(context), context))

    @classmethod
    def build_worker(cls, context: ConnectorContext) -> SqliteWorker:
        """The worker half; ConfigError when an option is wrong."""
        return SqliteWorker(BlockTable(_get_path(context), context))


def _get_path(context: ConnectorContext) -> Path:
    unknown = context.options.keys() - {"path"}
    if unknown or "path" not in context.options:
        raise ConfigError("connector sqlite takes one option, path: the database file that all engines share")
    return Path(context.options["path"])


def _pair(request: KVRequest, block_ids: Sequence[int], start: int, end: int) -> list[tuple[bytes, int, int]]:
    pairs = zip(request.block_keys[start:end], block_ids[start:end], strict=False)
    return [(key.digest, key.num_tokens, block_id) for key, block_id in pairs]
