"""Ranks as threads that put their columns together through one piece of memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import IO

import pytest
import torch
from torch import Tensor

from pdserve.kernels.rank_exchange import RankExchange, exchange_bytes

NUM_RANKS = 3


@pytest.fixture
def memory() -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile() as file:
        file.truncate(exchange_bytes(NUM_RANKS))
        yield file


def run_on_ranks(memory: IO[bytes], function: Callable[[RankExchange, int], list[Tensor]]) -> list[list[Tensor]]:
    with ThreadPoolExecutor(NUM_RANKS) as pool:
        exchanges = [RankExchange(memory.fileno(), rank, NUM_RANKS, timeout_s=60) for rank in range(NUM_RANKS)]
        return [future.result(90) for future in [pool.submit(function, e, r) for r, e in enumerate(exchanges)]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_every_rank_has_all_columns_side_by_side(memory: IO[bytes], dtype: torch.dtype) -> None:
    shapes = [(1, 192), (7, 64), (5, 1), (512, 192), (1, 192), (2, 3)]
    columns = [[torch.randn(*shape).to(dtype) for shape in shapes] for _ in range(NUM_RANKS)]
    expected = [torch.cat(parts, dim=1) for parts in zip(*columns, strict=True)]

    def gather_all(exchange: RankExchange, rank: int) -> list[Tensor]:
        return [exchange.gather(part) for _ in range(20) for part in columns[rank]]

    for results in run_on_ranks(memory, gather_all):
        assert len(results) == 20 * len(shapes)
        for index, result in enumerate(results):
            assert torch.equal(result, expected[index % len(shapes)])


def test_more_rows_than_fit_at_once_come_in_parts(memory: IO[bytes]) -> None:
    whole = torch.arange(1100 * 3000.0).view(1100, 3000)
    assert whole.nbytes / NUM_RANKS > 4 << 20

    def gather(exchange: RankExchange, rank: int) -> list[Tensor]:
        return [exchange.gather(whole[:, 1000 * rank : 1000 * rank + 1000]) for _ in range(2)]

    for results in run_on_ranks(memory, gather):
        assert all(torch.equal(result, whole) for result in results)


def test_columns_of_a_view_are_taken_as_they_look(memory: IO[bytes]) -> None:
    whole = torch.arange(60.0).view(5, 12)

    def gather(exchange: RankExchange, rank: int) -> list[Tensor]:
        return [exchange.gather(whole[:, 4 * rank : 4 * rank + 4])]

    assert all(torch.equal(result, whole) for (result,) in run_on_ranks(memory, gather))


def test_a_rank_that_does_not_come_is_not_waited_for_for_ever(memory: IO[bytes]) -> None:
    alone = RankExchange(memory.fileno(), 0, NUM_RANKS, timeout_s=0.05)
    with pytest.raises(TimeoutError, match="another rank"):
        alone.gather(torch.zeros(1, 4))


def test_a_row_larger_than_a_slot_is_refused(memory: IO[bytes]) -> None:
    alone = RankExchange(memory.fileno(), 0, NUM_RANKS, timeout_s=0.05)
    with pytest.raises(MemoryError):
        alone.gather(torch.zeros(1, (4 << 20) // 4 + 1))
