"""A forward pass's stand-in: it keeps one core as busy, for as long, as computing a step's tokens would."""

from __future__ import annotations

import time

import torch

_SIZE = 512
"""A product of this size takes a millisecond or two of one core."""


class PacedForward:
    """Matrix products until the time is over; like the engine's kernels, they run without Python's lock."""

    def __init__(self) -> None:
        torch.set_num_threads(1)  # as an engine's; the other cores are whoever's KV moves
        self._matrix = torch.zeros((_SIZE, _SIZE), dtype=torch.float32)
        self._product = torch.empty_like(self._matrix)

    def compute(self, seconds: float) -> None:
        """Take that long, and a product more at most."""
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            torch.mm(self._matrix, self._matrix, out=self._product)
