"""Memory for packed weights: large pieces on huge pages, weights one behind another.

A decode step reads every weight once. On small pages it pays a translation every 4 KiB; huge pages are given only to
aligned stretches of 2 MiB, which single layers of a small model do not fill.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

_PIECE_BYTES = 64 << 20
_ALIGNMENT_BYTES = 64


class WeightMemory:
    """Hands out memory that lives as long as a tensor in it does.

    Pages are taken from the system as they are first written, so a piece's unused end costs nothing.
    """

    def __init__(self) -> None:
        self._piece = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Zeroed [num_elements], aligned to a cache line."""
        num_bytes = num_elements * dtype.itemsize
        if self._used + num_bytes > self._piece.shape[0]:
            self._piece = _map_piece(max(num_bytes, _PIECE_BYTES))
            self._used = 0
        taken = self._piece[self._used : self._used + num_bytes]
        self._used += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return taken.view(dtype)


def _map_piece(num_bytes: int) -> Tensor:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
