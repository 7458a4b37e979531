"""Embeddings out of the head's panels, and the likeliest token without logits in memory: the same bits as with both."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pdserve.kernels.base import LinearWeight, Rotation, Tables
from pdserve.kernels.cpp_backend import CppBackend
from pdserve.kernels.native_library import get_supported_variants
from pdserve.kernels.row_maxima import find_row_maxima

BF16 = torch.bfloat16
VARIANTS = [variant.name for variant in get_supported_variants()]
HEAD_DIM, NUM_POSITIONS = 24, 50


def random_rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(BF16)


def build_tables(embedding: LinearWeight) -> Tables:
    cos, sin = random_rows(2, NUM_POSITIONS, HEAD_DIM, seed=1).float()
    return Tables(embedding, Rotation(cos, sin))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("quantization", ["none", "int8", "w8a8"])
@pytest.mark.parametrize(("vocab_size", "hidden_size"), [(70, 36), (64, 31)])
def test_what_is_looked_up_is_what_was_there(
    variant: str, quantization: str, vocab_size: int, hidden_size: int
) -> None:
    backend = CppBackend(variant, num_threads=2, quantization=quantization)
    table = random_rows(vocab_size, hidden_size)
    head = backend.prepare_linear(table, None)
    embedding = backend.prepare_embedding(table, head)
    assert (embedding is head) == (quantization == "none")
    tables = build_tables(embedding)
    token_ids = torch.arange(vocab_size).flip(0)
    positions = (token_ids * 7) % NUM_POSITIONS
    embedded, rotation = backend.look_up(tables, token_ids, positions)
    assert torch.equal(embedded, table[token_ids])
    assert torch.equal(rotation.cos_TH, tables.rotation.cos_TH[positions])
    assert torch.equal(rotation.sin_TH, tables.rotation.sin_TH[positions])


@pytest.mark.parametrize(("token_id", "position"), [(70, 0), (-1, 0), (0, NUM_POSITIONS), (0, -1)])
def test_ids_outside_the_tables_are_refused(token_id: int, position: int) -> None:
    backend = CppBackend()
    tables = build_tables(backend.prepare_embedding(random_rows(70, 36), None))
    with pytest.raises(IndexError, match="outside the model's tables"):
        backend.look_up(tables, torch.tensor([3, token_id]), torch.tensor([3, position]))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("quantization", ["none", "int8", "w8a8"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_largest_outputs_are_those_of_the_whole_product(variant: str, quantization: str, num_threads: int) -> None:
    backend = CppBackend(variant, num_threads, quantization)
    weight = backend.prepare_linear(random_rows(1003, 75), random_rows(1003, seed=1))
    rows = random_rows(41, 80, seed=2)[:, :75]
    indices, values = find_row_maxima(backend.linear_float32(rows, weight))
    for first, count in ((0, 41), (0, 1), (7, 1), (17, 16)):
        part_indices, part_values = backend.linear_argmax(rows[first : first + count], weight)
        assert torch.equal(part_indices, indices[first : first + count])
        assert torch.equal(part_values, values[first : first + count])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_threads", [1, 4])
def test_equal_outputs_give_the_lowest_index(variant: str, num_threads: int) -> None:
    backend = CppBackend(variant, num_threads)
    bias = torch.zeros(600)
    bias[[599, 423, 300, 258]] = 2.0
    weight = backend.prepare_linear(torch.zeros(600, 8, dtype=BF16), bias.to(BF16))
    indices, values = backend.linear_argmax(random_rows(3, 8), weight)
    assert indices.tolist() == [258] * 3
    assert values.tolist() == [2.0] * 3


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("index", [0, 290, 298])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_outputs_that_are_not_finite(variant: str, index: int, value: float) -> None:
    """A NaN counts as the largest wherever it stands; minus infinity is a number like others."""
    backend = CppBackend(variant)
    bias = torch.arange(299).float() % 128
    bias[index] = value
    weight = backend.prepare_linear(torch.zeros(299, 8, dtype=BF16), bias.to(BF16))
    indices, values = backend.linear_argmax(random_rows(1, 8), weight)
    if math.isnan(value):
        assert math.isnan(float(values))
    else:
        assert float(values) == float(bias.max())
        assert int(indices) == int(bias.argmax())


def test_nothing_but_minus_infinity() -> None:
    backend = CppBackend()
    weight = backend.prepare_linear(torch.zeros(40, 8, dtype=BF16), torch.full((40,), -math.inf, dtype=BF16))
    indices, values = backend.linear_argmax(random_rows(2, 8), weight)
    assert indices.tolist() == [0, 0]
    assert values.tolist() == [-math.inf] * 2
