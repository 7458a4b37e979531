"""Blocks with known content, taken in turn, so that each is out of the processor's caches when it is used again."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from pdserve.engine.kv_memory import allocate_kv_cache
from pdserve.kv_layout import KVCacheSpec

_CONTENT_SEED = 20

Rows = npt.NDArray[np.uint8]


class BlockRing:
    """An engine's pool of blocks, allocated as an engine allocates it; every page of it is mapped.

    Args:
        spec: shape of a block.
        num_blocks: B.

    Attributes:
        kv_cache: ``[B, L, 2, K, S, H]``, for the connector.
        rows: the same bytes, ``[B, block_bytes]``.
    """

    def __init__(self, spec: KVCacheSpec, num_blocks: int) -> None:
        self._block_size = spec.block_size
        self.kv_cache = allocate_kv_cache(spec, num_blocks)
        self.rows: Rows = self.kv_cache.view(num_blocks, -1).view(torch.uint8).numpy()
        self.rows.fill(0)
        self._next = 0

    def take(self, num_blocks: int) -> slice:
        """The next blocks, side by side; those that were taken longest ago."""
        start = self._next if self._next + num_blocks <= len(self.rows) else 0
        self._next = start + num_blocks
        return slice(start, start + num_blocks)

    def fill(self) -> None:
        """Put the bytes in that every filled ring of this size holds."""
        content = np.random.default_rng(_CONTENT_SEED).bytes(self.rows.nbytes)
        self.rows[:] = np.frombuffer(content, dtype=np.uint8).reshape(self.rows.shape)

    def clear_behind(self, blocks: slice, num_tokens: int) -> None:
        """Zero the slots of ``blocks`` that lie behind a prompt of ``num_tokens``: they are no part of its KV."""
        num_in_last = num_tokens % self._block_size
        if num_in_last:
            self.kv_cache[blocks.stop - 1, :, :, :, num_in_last:] = 0
