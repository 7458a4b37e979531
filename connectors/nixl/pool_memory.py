"""The engine's pool of blocks as this connector uses it: an address for NIXL, bytes for checksums.

In CPU memory a checksum reads the block where it lies. In GPU memory the block is copied out first, which costs
about as much as moving it: integrity is not optional.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from pdserve.connectors.nixl.descriptors import DRAM, VRAM, MemoryRegion
from pdserve.connectors.nixl.options import CONNECTOR_NAME
from pdserve.errors import ConfigError
from pdserve.kv_layout import KVCacheSpec

_MEMORY_KINDS = {"cpu": DRAM, "cuda": VRAM}
CHECKSUM_DTYPE = np.dtype("<u8")

Checksums = npt.NDArray[np.uint64]


class PoolMemory:
    """Blocks as rows. Any thread may use it on blocks that are its to use.

    Args:
        kv_cache: ``[B, L, 2, K, S, H]``, contiguous, in CPU or CUDA memory.
        spec: shape of a block.

    Raises:
        ConfigError: the memory is of another kind, or not of the expected shape.
    """

    def __init__(self, kv_cache: torch.Tensor, spec: KVCacheSpec) -> None:
        shape = tuple(kv_cache.shape[1:])
        if shape != spec.block_shape or not kv_cache.is_contiguous():
            raise ConfigError(
                f"connector {CONNECTOR_NAME}: KV cache has blocks of shape {shape}, expected {spec.block_shape}"
            )
        device = kv_cache.device
        if device.type not in _MEMORY_KINDS:
            raise ConfigError(f"connector {CONNECTOR_NAME} moves CPU and CUDA memory; the KV cache is on {device}")
        self._blocks = kv_cache
        self._rows = kv_cache.view(torch.uint8).reshape(kv_cache.shape[0], -1)
        self._host_rows: npt.NDArray[np.uint8] | None = self._rows.numpy() if device.type == "cpu" else None
        self.region = MemoryRegion(
            address=kv_cache.data_ptr(),
            num_blocks=kv_cache.shape[0],
            block_bytes=spec.block_bytes,
            memory=_MEMORY_KINDS[device.type],
            device=device.index or 0,
        )

    def get_checksums(self, block_ids: Iterable[int]) -> Checksums:
        """xxh3_64 of each block, in order."""
        values = [xxhash.xxh3_64_intdigest(self._get_bytes(block_id)) for block_id in block_ids]
        return np.array(values, dtype=CHECKSUM_DTYPE)

    def clear_behind(self, block_id: int, num_tokens: int) -> None:
        """Zero a block's slots from ``num_tokens`` on: what others left there does not travel."""
        self._blocks[block_id, :, :, :, num_tokens:] = 0
        self._wait_for_device()

    def wipe(self, block_ids: Iterable[int]) -> None:
        """Zero blocks that unverified bytes were read into.

        Kernels multiply slots behind a sequence's end by zero; a stray NaN would survive that.
        """
        for block_id in block_ids:
            self._rows[block_id] = 0
        self._wait_for_device()

    def _wait_for_device(self) -> None:
        """A GPU writes after the call that asks for it; NIXL reads and writes behind its back."""
        if self._host_rows is None:
            torch.cuda.current_stream(self._blocks.device).synchronize()

    def _get_bytes(self, block_id: int) -> memoryview:
        if self._host_rows is not None:
            row: npt.NDArray[np.uint8] = self._host_rows[block_id]
        else:
            row = self._rows[block_id].cpu().numpy()
        return row.data
