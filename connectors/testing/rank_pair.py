"""Two worker halves behind one scheduler half, and the engine's part in merging what they report.

Both hold the same heads, as ranks do when there are fewer heads than ranks, so what a store holds is right for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from pdserve.connectors.base import ConnectorMetadata, ConnectorOutput, KVConnectorWorker
from pdserve.connectors.testing.harness import EngineHarness
from pdserve.connectors.testing.violations import RuleViolationError
from pdserve.kv_layout import KVCacheSpec
from pdserve.protocol import Role

if TYPE_CHECKING:
    from pdserve.connectors.testing.bench import Bench


class RankPair:
    """A worker half that is two; give `add_first` to the engine as its wrapper.

    Args:
        bench: builds the second half.
    """

    def __init__(self, bench: Bench) -> None:
        context = bench.build_context(Role.DECODE, "second-rank")
        self._second = bench.target.connector.build_worker(context)
        self._first: KVConnectorWorker | None = None
        self._second_cache = torch.zeros(0)
        self._is_second_held = False
        self._held: list[ConnectorMetadata] = []
        self._reports: tuple[dict[str, int | None], dict[str, int | None]] = ({}, {})

    def add_first(self, worker: KVConnectorWorker) -> KVConnectorWorker:
        """Take the engine's own half as the first rank."""
        self._first = worker
        return self

    @property
    def reported_by_first(self) -> frozenset[str]:
        """Requests whose load the first rank has reported and the second has not."""
        return frozenset(self._reports[0])

    def hold_second(self) -> None:
        """The second rank gets no messages for a while."""
        self._is_second_held = True

    def let_second_go(self) -> None:
        """It gets what it missed, in order."""
        self._is_second_held = False
        while self._held:
            self._second.start_load_kv(self._held.pop(0))
            self._second.wait_for_save()

    def require_exact(
        self, engine: EngineHarness, request_id: str, token_ids: Sequence[int], num_good: int, *, rule: str = "R12"
    ) -> None:
        """The second rank's memory holds what the first one's does; ``rule`` is broken if it does not.

        Raises:
            RuleViolationError: it does not.
        """
        size = engine.context.spec.block_size
        first, second = (cache.view(torch.uint8) for cache in (engine.memory.kv_cache, self._second_cache))
        for index, block_id in enumerate(engine.get_block_ids(request_id)):
            slots = slice(0, max(min(num_good - index * size, size), 0))
            if not torch.equal(first[block_id][..., slots, :], second[block_id][..., slots, :]):
                raise RuleViolationError(rule, f"block {index} of {len(token_ids)} tokens differs between two ranks")

    # --- the worker half ------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_cache: torch.Tensor, spec: KVCacheSpec) -> None:
        """Each rank has memory of its own."""
        self._second_cache = torch.zeros_like(kv_cache)
        self._get_first().register_kv_caches(kv_cache, spec)
        self._second.register_kv_caches(self._second_cache, spec)

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        """One message for all ranks."""
        self._get_first().start_load_kv(metadata)
        if self._is_second_held:
            self._held.append(metadata)
        else:
            self._second.start_load_kv(metadata)

    def wait_for_layer_load(self, layer: int) -> None:
        """Both wait."""
        self._get_first().wait_for_layer_load(layer)
        self._second.wait_for_layer_load(layer)

    def save_kv_layer(self, layer: int) -> None:
        """A consumer saves nothing, but is asked."""
        self._get_first().save_kv_layer(layer)
        self._second.save_kv_layer(layer)

    def wait_for_save(self) -> None:
        """Both wait."""
        self._get_first().wait_for_save()
        if not self._is_second_held:
            self._second.wait_for_save()

    def get_finished(self, finished_request_ids: Sequence[str]) -> ConnectorOutput:
        """A load has ended when both ranks say so, with the smaller of the two counts."""
        output = self._get_first().get_finished(finished_request_ids)
        second = self._second.get_finished(())
        output.stats.add(second.stats)
        output.parts, output.received_bytes = {}, {}
        for report, found in zip(self._reports, (output, second), strict=True):
            report.update(dict.fromkeys(found.finished_receiving))
            report.update(found.failed_receiving)
        output.invalid_block_ids |= second.invalid_block_ids
        output.finished_receiving, output.failed_receiving = set(), {}
        for request_id in self._reports[0].keys() & self._reports[1].keys():
            counts = [report.pop(request_id) for report in self._reports]
            failed = [count for count in counts if count is not None]
            if failed:
                output.failed_receiving[request_id] = min(failed)
            else:
                output.finished_receiving.add(request_id)
        return output

    def close(self) -> None:
        """Both close."""
        self._get_first().close()
        self._second.close()

    def _get_first(self) -> KVConnectorWorker:
        assert self._first is not None
        return self._first
