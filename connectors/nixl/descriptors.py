"""Blocks as NIXL addresses them: one descriptor a block, because a block is one span of bytes.

Pure: numbers in, arrays out. Knows neither NIXL nor tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

DRAM = "DRAM"
VRAM = "VRAM"

Descriptors = npt.NDArray[np.uint64]
"""``[B, 3]``: address, length, device, a row for each block."""


class MemoryRegion(msgspec.Struct, frozen=True):
    """One pool of blocks in one process's memory.

    Attributes:
        address: of block 0.
        num_blocks: B.
        block_bytes: of one block; blocks follow one another without gaps.
        memory: `DRAM` or `VRAM`.
        device: number of the GPU; 0 in DRAM.
    """

    address: int
    num_blocks: int
    block_bytes: int
    memory: str = DRAM
    device: int = 0

    @property
    def num_bytes(self) -> int:
        """Of all blocks."""
        return self.num_blocks * self.block_bytes


def build_registration(region: MemoryRegion) -> list[tuple[int, int, int, str]]:
    """The whole pool as one region to register: (address, length, device, tag)."""
    return [(region.address, region.num_bytes, region.device, "")]


def build_descriptors(region: MemoryRegion) -> Descriptors:
    """A descriptor for each block, so that a block's id is its descriptor's index."""
    descriptors: Descriptors = np.empty((region.num_blocks, 3), dtype=np.uint64)
    offsets = np.arange(region.num_blocks, dtype=np.uint64) * np.uint64(region.block_bytes)
    descriptors[:, 0] = np.uint64(region.address) + offsets
    descriptors[:, 1] = region.block_bytes
    descriptors[:, 2] = region.device
    return descriptors


def build_indices(block_ids: Sequence[int]) -> npt.NDArray[np.int32]:
    """Block ids as NIXL takes them."""
    return np.asarray(block_ids, dtype=np.int32)
