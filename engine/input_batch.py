"""The runner's requests as arrays: a row each, changed by difference.

A step's inputs cost a few array operations, whatever the number of requests. Owns token ids and block tables; knows
nothing of sampling, models or queues.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.scheduler_output import NewRequest, ScheduledRequest
from pdserve.kernels.base import AttentionMetadata


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What a step computes.

    Attributes:
        token_ids: [T] int64, the tokens packed.
        metadata: whose they are, and where their KV goes.
        sampling_indices: which of the step's requests reach their last known token, and so get another.
    """

    token_ids: Tensor
    metadata: AttentionMetadata
    sampling_indices: list[int]

    @property
    def last_rows(self) -> Tensor:
        """[R'] int64, the packed index of the last token of each request that gets another."""
        return torch.from_numpy(self.metadata.query_start_loc_array[1:][self.sampling_indices] - 1)


class InputBatch:
    """Token ids and block tables of the requests that the runner knows.

    Memory is reserved for every request that may run, and touched only as far as sequences reach.

    Args:
        max_num_seqs: requests at once.
        max_model_len: tokens of the longest sequence.
        block_size: S.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self._block_size = block_size
        self._token_ids = np.empty((max_num_seqs, max_model_len), dtype=np.int32)
        self._block_table = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int64)
        self._num_tokens = [0] * max_num_seqs
        self._num_blocks = [0] * max_num_seqs
        self._rows: dict[str, int] = {}
        self._free_rows = list(reversed(range(max_num_seqs)))

    def add(self, request: NewRequest) -> None:
        """Take a request in; the runner does not know its id."""
        assert request.request_id not in self._rows, f"request {request.request_id} is added twice"
        row = self._free_rows.pop()
        self._rows[request.request_id] = row
        self._num_tokens[row], self._num_blocks[row] = len(request.token_ids), 0
        self._token_ids[row, : len(request.token_ids)] = request.token_ids
        self.append_blocks(request.request_id, request.block_ids)

    def drop(self, request_id: str) -> None:
        """Forget a request; unknown ids are ignored."""
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free_rows.append(row)

    def append_blocks(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Blocks behind the request's table."""
        row = self._rows[request_id]
        start, end = self._num_blocks[row], self._num_blocks[row] + len(block_ids)
        self._block_table[row, start:end] = block_ids
        self._num_blocks[row] = end

    def append_tokens(self, request_ids: Iterable[str], token_ids: Iterable[int]) -> None:
        """A token behind those known, for each of these requests."""
        for request_id, token_id in zip(request_ids, token_ids, strict=True):
            row = self._rows[request_id]
            self._token_ids[row, self._num_tokens[row]] = token_id
            self._num_tokens[row] += 1

    def get_token_ids(self, request_id: str) -> NDArray[np.int32]:
        """The request's tokens so far, prompt and output; a view, good until the next change."""
        row = self._rows[request_id]
        return self._token_ids[row, : self._num_tokens[row]]

    def build_inputs(self, items: Sequence[ScheduledRequest]) -> StepInputs:
        """Gather what a step computes; ``items`` is not empty."""
        rows = [self._rows[item.request_id] for item in items]
        seq_lens = [item.num_computed_tokens + item.num_scheduled_tokens for item in items]
        starts = [0, *itertools.accumulate(item.num_scheduled_tokens for item in items)]
        rows_R, seq_lens_R = np.array(rows, dtype=np.int64), np.array(seq_lens, dtype=np.int64)
        num_blocks = -(-max(seq_lens) // self._block_size)
        metadata = AttentionMetadata(
            block_size=self._block_size,
            query_start_loc_array=np.array(starts, dtype=np.int64),
            seq_lens_array=seq_lens_R,
            block_table_array=np.ascontiguousarray(self._block_table[rows_R, :num_blocks]),
        )
        rows_T = rows_R if starts[-1] == len(rows) else np.repeat(rows_R, np.diff(metadata.query_start_loc_array))
        token_ids_T = self._token_ids[rows_T, metadata.positions.numpy()].astype(np.int64)
        known = zip(rows, seq_lens, strict=True)
        complete = [index for index, (row, seq_len) in enumerate(known) if seq_len == self._num_tokens[row]]
        return StepInputs(torch.from_numpy(token_ids_T), metadata, complete)
