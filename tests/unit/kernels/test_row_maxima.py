from __future__ import annotations

import torch

from pdserve.kernels.row_maxima import find_row_maxima


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
