"""Quantised linear layers: what they compute, on every instruction set, and that rows don't depend on one another."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.cpp_backend import CppBackend
from pdserve.kernels.native_library import get_supported_variants

BF16 = torch.bfloat16
VARIANTS = [variant.name for variant in get_supported_variants()]
QUANTIZED = ["int8", "w8a8"]
STEPS = {"int8": 32767, "w8a8": 127}
"""What the largest input of a group becomes."""
GROUPS = {"int8": 256, "w8a8": 64}
"""Inputs that share a scale."""


def round_to_int8(values: Tensor) -> Tensor:
    """Each row to the nearest of 255 steps, as float64."""
    scale = values.float().abs().amax(-1, keepdim=True) / 127
    return ((values.float() / scale).nan_to_num().round() * scale.double()).double()


def round_in_groups(rows: Tensor, quantization: str) -> Tensor:
    """Each group of a row's inputs to the nearest step of its scale, as float64; multiplies by a rounded reciprocal."""
    width, most = rows.shape[1], STEPS[quantization]
    groups = functional.pad(rows.float(), (0, -width % GROUPS[quantization])).view(
        rows.shape[0], -1, GROUPS[quantization]
    )
    scale = groups.abs().amax(-1, keepdim=True) / most
    steps = torch.where(scale > 0, 1 / scale, 0)
    rounded = (groups * steps).clamp(-most, most).round()
    return (rounded.double() * scale.double()).flatten(1)[:, :width]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("quantization", QUANTIZED)
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 192), (576, 100), (203, 33)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_rounded_factors(
    variant: str, quantization: str, in_features: int, out_features: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(in_features)
    backend = CppBackend(variant, num_threads=1, quantization=quantization)
    weight = (torch.randn(out_features, in_features, generator=generator) / in_features**0.5).to(BF16)
    weight[3] = 0
    bias = torch.randn(out_features, generator=generator).to(BF16) if has_bias else None
    rows = torch.randn(90, in_features, generator=generator).to(BF16)
    rows[5, 17] = 300.0  # costs its neighbours their precision, not the rest of the row
    rows[6] = 0
    expected = round_in_groups(rows, quantization) @ round_to_int8(weight).T + (
        bias.double() if bias is not None else 0
    )
    prepared = backend.prepare_linear(weight, bias)
    whole = backend.linear_float32(rows, prepared)
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=2e-4)
    assert torch.equal(backend.linear(rows, prepared), whole.to(BF16))
    strided = torch.cat((rows, rows), 1)
    assert torch.equal(backend.linear_float32(strided[:, :in_features], prepared), whole)
    for count, first in ((1, 0), (1, 5), (2, 4), (3, 87), (14, 60), (15, 60), (33, 1)):
        part = backend.linear_float32(rows[first : first + count], prepared)
        assert torch.equal(part, whole[first : first + count]), f"{count} rows from {first} differ"


def test_inputs_of_16_bits_lose_less_than_rounding_the_outputs_does() -> None:
    """A quarter of it at most, though one input is 100 times the others of its group."""
    generator = torch.Generator().manual_seed(4)
    backend = CppBackend(num_threads=1, quantization="int8")
    weight = torch.randn(100, 576, generator=generator).to(BF16)
    rows = torch.randn(200, 576, generator=generator).to(BF16)
    rows[:, 40] = 100.0
    product = backend.linear_float32(rows, backend.prepare_linear(weight, None)).double()
    expected = rows.double() @ round_to_int8(weight).T
    assert (product - expected).abs().mean() < (expected.to(BF16) - expected).abs().mean() / 4


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_threads_and_row_blocks_change_no_bit(quantization: str) -> None:
    """As many rows as fall into several blocks, so that parts of the weights are used more than once."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(1152, 1536, generator=generator).to(BF16)
    rows = torch.randn(700, 1536, generator=generator).to(BF16)
    results = []
    for threads in (1, 2, 3):
        backend = CppBackend(num_threads=threads, quantization=quantization)
        prepared = backend.prepare_linear(weight, None)
        results.append([backend.linear(rows[:n], prepared) for n in (1, 20, 700)])
    for one, two, three in zip(*results, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    assert torch.equal(results[0][0], results[0][2][:1])
    assert torch.equal(results[0][1], results[0][2][:20])


@pytest.mark.parametrize("quantization", QUANTIZED)
def test_weights_take_half_of_the_memory(quantization: str) -> None:
    weight = torch.ones(320, 576, dtype=BF16)
    packed = CppBackend(quantization=quantization).prepare_linear(weight, None)
    assert packed.data.nbytes == weight.nbytes // 2
    assert packed.scales is not None
    assert packed.scales.tolist() == [pytest.approx(1 / 127)] * 320


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("quantization", QUANTIZED)
def test_what_is_not_a_number_stays_visible(variant: str, quantization: str) -> None:
    weight, rows = torch.ones(64, 130, dtype=BF16), torch.ones(3, 130, dtype=BF16)
    weight[2, 5] = math.nan
    rows[1, 129] = math.nan
    backend = CppBackend(variant, quantization=quantization)
    product = backend.linear(rows, backend.prepare_linear(weight, None))
    assert product[:, 2].isnan().all()
    assert product[1].isnan().all()
    assert (product[[0, 2]][:, [0, 1, 3, 63]] == 130).all()


def test_numerics_name_the_quantisation() -> None:
    names = [CppBackend(quantization=quantization).numerics for quantization in ("none", *QUANTIZED)]
    assert len(set(names)) == 3
    assert CppBackend(quantization="int8").numerics == names[1]
