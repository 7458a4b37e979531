"""A step's structure as kernels read it: items of attention, block table and slots, in one tensor on the device.

An item is some consecutive tokens of one request: (request, first packed token, number of tokens, position of the
first). One copy brings a step over; the same memory is filled again for a step that is replayed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pdserve.kernels.base import AttentionMetadata

ITEM_FIELDS = 4
NO_SLOT = -1
"""Where a token has no place in the cache: of rows that only pad a step."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StepShape:
    """How much a step holds: items, requests, tokens, and blocks in a row of its table."""

    num_items: int
    num_requests: int
    num_tokens: int
    table_width: int

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Elements of items, block table and slots, each beginning at an address that Triton takes as aligned."""
        table = self.num_requests * self.table_width
        return self.num_items * ITEM_FIELDS, table + table % 2, self.num_tokens


class DeviceStep:
    """One step's structure; all int64.

    Attributes:
        items: [I, 4].
        block_table: [R, M].
        slot_mapping: [T]; `NO_SLOT` where a row only pads the step.

    Args:
        shape: what it holds.
        device: where.
    """

    def __init__(self, shape: StepShape, device: torch.device) -> None:
        self._shape = shape
        self._flat = torch.empty(sum(shape.sizes), dtype=torch.int64, device=device)
        self.items, self.block_table, self.slot_mapping = _split(self._flat, shape)

    @classmethod
    def build(cls, metadata: AttentionMetadata, tokens_per_item: int, device: torch.device) -> DeviceStep:
        """``metadata`` on ``device``, in items of at most ``tokens_per_item`` tokens."""
        items = build_items(metadata, tokens_per_item)
        num_requests, table_width = metadata.block_table.shape
        step = cls(StepShape(len(items), num_requests, len(metadata.slot_mapping), table_width), device)
        step._write(metadata, items)
        return step

    def fill(self, metadata: AttentionMetadata) -> None:
        """Take a decode step in, which is no larger; rows that it does not fill have no context and no slot."""
        self._write(metadata, build_items(metadata, 1))

    def _write(self, metadata: AttentionMetadata, items: IntArray) -> None:
        host = torch.zeros(self._flat.shape, dtype=torch.int64)
        item_rows, table, slots = _split(host, self._shape)
        item_rows[:, 1] = torch.arange(len(item_rows))
        item_rows[:, 2] = 1
        item_rows[:, 3] = -1
        item_rows[: len(items)] = torch.from_numpy(items)
        num_requests, table_width = metadata.block_table.shape
        table[:num_requests, :table_width] = metadata.block_table
        slots.fill_(NO_SLOT)
        slots[: len(metadata.slot_mapping)] = metadata.slot_mapping
        self._flat.copy_(host)


def _split(flat: Tensor, shape: StepShape) -> tuple[Tensor, Tensor, Tensor]:
    """Items [I, 4], block table [R, M] and slots [T] as views of one tensor."""
    items, table, slots = torch.split(flat, list(shape.sizes))
    num_blocks = shape.num_requests * shape.table_width
    return (
        items.view(shape.num_items, ITEM_FIELDS),
        table[:num_blocks].view(shape.num_requests, shape.table_width),
        slots,
    )


def build_items(metadata: AttentionMetadata, tokens_per_item: int) -> IntArray:
    """[I, 4]: each request's tokens of this step, cut from its first one on."""
    starts = metadata.query_start_loc_array
    counts = -(-np.diff(starts) // tokens_per_item)
    request_I = np.repeat(np.arange(len(counts)), counts)
    index_I = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    first_I = starts[request_I] + index_I * tokens_per_item
    stops_I = starts[request_I + 1]
    num_tokens_I = np.minimum(stops_I - first_I, tokens_per_item)
    positions_I = metadata.seq_lens_array[request_I] - (stops_I - first_I)
    return np.stack((request_I, first_I, num_tokens_I, positions_I), axis=1)
