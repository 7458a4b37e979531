from __future__ import annotations

import math

import torch

from pdserve.kernels.row_maxima import find_lowest_maxima, find_row_maxima


def test_the_lowest_index_among_equals() -> None:
    values = torch.tensor([[0.0, 3.0, 1.0, 3.0], [-0.0, 0.0, -1.0, -2.0], [-5.0, -5.0, -5.0, -5.0]])
    indices, largest = find_row_maxima(values)
    assert indices.dtype == torch.int64
    assert indices.tolist() == [1, 0, 0]
    assert largest.tolist() == [3.0, 0.0, -5.0]


def test_a_nan_counts_as_the_largest() -> None:
    indices, largest = find_row_maxima(torch.tensor([[1.0, torch.nan, torch.inf]]))
    assert indices.tolist() == [1]
    assert largest.isnan().all()


def test_a_gpus_operations_give_the_same() -> None:
    values = torch.randint(-3, 3, (50, 40), generator=torch.Generator().manual_seed(0)).float()
    values[3, 7], values[3, 20], values[4, 39], values[5] = math.nan, math.nan, math.inf, -math.inf
    for actual, expected in zip(find_lowest_maxima(values), find_row_maxima(values), strict=True):
        assert torch.equal(actual.nan_to_num(7.5), expected.nan_to_num(7.5))
        assert actual.dtype == expected.dtype
