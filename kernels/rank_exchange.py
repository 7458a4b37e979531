"""Ranks of one machine put their columns together: in C++, through memory that they share (csrc/exchange.h).

Measured on two cores against torch.distributed's gloo, which goes through loopback and wakes a thread for each message:
see docs/performance.md.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

from pdserve.kernels.native_library import choose_variant, load_library, require_done


class RankExchange:
    """One rank's end. All ranks make the same calls in the same order.

    Args:
        fd: of `exchange_bytes` of memory, zeros at first, the same for all ranks; may be closed afterwards.
        rank: this one, from 0.
        num_ranks: how many there are.
        timeout_s: how long a call waits for the others.

    Raises:
        ConfigError: there are no compiled kernels here.
    """

    def __init__(self, fd: int, rank: int, num_ranks: int, timeout_s: float) -> None:
        self._library = load_library(choose_variant(None))
        self._memory = torch.frombuffer(mmap.mmap(fd, exchange_bytes(num_ranks)), dtype=torch.uint8)
        self._rank = rank
        self._num_ranks = num_ranks
        self._timeout_ms = int(timeout_s * 1000)

    def gather(self, columns_TC: Tensor) -> Tensor:
        """All ranks' columns side by side, in the order of the ranks: [T, ranks * C].

        Raises:
            TimeoutError: another rank does not come.
            MemoryError: a row of ``columns_TC`` is too large.
        """
        columns_TC = columns_TC.contiguous()
        num_rows, width = columns_TC.shape
        gathered = columns_TC.new_empty(num_rows, self._num_ranks * width)
        status = self._library.pds_gather(
            self._memory.data_ptr(),
            self._rank,
            self._num_ranks,
            self._timeout_ms,
            columns_TC.data_ptr(),
            num_rows,
            width * columns_TC.element_size(),
            gathered.data_ptr(),
        )
        require_done(status)
        return gathered


def exchange_bytes(num_ranks: int) -> int:
    """Memory that so many ranks need to exchange columns.

    Raises:
        ConfigError: there are no compiled kernels here.
    """
    return int(load_library(choose_variant(None)).pds_exchange_bytes(num_ranks))
