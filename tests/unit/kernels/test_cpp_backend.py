from __future__ import annotations

import math

import pytest
import torch

from pdserve.errors import ConfigError
from pdserve.kernels.base import AttentionMetadata, Rotation
from pdserve.kernels.cpp_backend import CppBackend
from pdserve.kernels.native_library import get_supported_variants
from pdserve.kernels.registry import get_backend

BF16 = torch.bfloat16
VARIANTS = [variant.name for variant in get_supported_variants()]


@pytest.fixture(params=VARIANTS)
def backend(request: pytest.FixtureRequest) -> CppBackend:
    return CppBackend(request.param, num_threads=1)


def test_the_best_variant_is_taken_and_others_can_be_asked_for() -> None:
    assert CppBackend().variant == VARIANTS[0]
    assert CppBackend("portable").variant == "portable"


def test_a_variant_that_does_not_run_here_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"'altivec' does not run on this processor; it runs .*portable"):
        CppBackend("altivec")


def test_float32_is_refused_with_what_computes_it() -> None:
    with pytest.raises(ConfigError, match=r"'cpp' computes in bfloat16, not torch\.float32; use auto, reference"):
        get_backend("cpp", torch.float32)


def test_numerics_tells_variants_apart_and_is_stable() -> None:
    classes = [CppBackend(name).numerics for name in VARIANTS]
    assert len(set(classes)) == len(VARIANTS)
    assert [CppBackend(name).numerics for name in VARIANTS] == classes


# Inputs that don't fill a pair, outputs that don't fill a panel; strides at which rows share cache sets.
@pytest.mark.parametrize(
    ("in_features", "out_features"), [(1, 1), (37, 33), (63, 100), (1024, 48), (2048, 32), (3, 31)]
)
def test_linears_of_odd_shapes_agree_with_float64(backend: CppBackend, in_features: int, out_features: int) -> None:
    generator = torch.Generator().manual_seed(in_features)
    weight = torch.randn(out_features, in_features, generator=generator).to(BF16)
    bias = torch.randn(out_features, generator=generator).to(BF16)
    rows = torch.randn(40, in_features, generator=generator).to(BF16)
    prepared = backend.prepare_linear(weight, bias)
    whole = backend.linear_float32(rows, prepared)
    expected = rows.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-4)
    assert torch.equal(backend.linear(rows, prepared), whole.to(BF16))
    for count in (1, 3, 5, 13, 29):
        assert torch.equal(backend.linear_float32(rows[7 : 7 + count], prepared), whole[7 : 7 + count])


def test_rows_may_lie_apart_and_weights_may_be_part_of_others(backend: CppBackend) -> None:
    generator = torch.Generator().manual_seed(0)
    wide = torch.randn(9, 200, generator=generator).to(BF16)
    stacked = torch.randn(100, 64, generator=generator).to(BF16)
    part, transposed = backend.prepare_linear(stacked[30:70], None), backend.prepare_linear(stacked.T, None)
    plain = backend.prepare_linear(stacked[30:70].clone(), None)
    assert torch.equal(backend.linear(wide[:, 10:74], part), backend.linear(wide[:, 10:74].contiguous(), plain))
    expected = wide[:, :100].double() @ stacked.double()
    actual = backend.linear_float32(wide[:, :100], transposed).double()
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


def test_a_broken_row_breaks_no_other(backend: CppBackend) -> None:
    generator = torch.Generator().manual_seed(0)
    prepared = backend.prepare_linear(torch.randn(70, 96, generator=generator).to(BF16), None)
    rows = torch.randn(20, 96, generator=generator).to(BF16)
    whole = backend.linear(rows, prepared)
    rows[4, 7], rows[11, 0] = math.nan, math.inf
    broken = backend.linear(rows, prepared)
    assert broken[4].isnan().all()
    kept = [r for r in range(20) if r not in (4, 11)]
    assert torch.equal(broken[kept], whole[kept])


@pytest.mark.parametrize("group_size", range(1, 9))
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_attention_of_any_group_size_agrees_with_float64(backend: CppBackend, group_size: int, head_dim: int) -> None:
    generator = torch.Generator().manual_seed(group_size)
    num_heads, length = 2 * group_size, 150
    block_ids = torch.randperm(10, generator=generator).tolist()
    kv_cache = torch.randn(10, 1, 2, 2, 16, head_dim, generator=generator).to(BF16)
    kv_cache[block_ids[-1], :, :, :, 6:] = math.nan
    q = torch.randn(40, num_heads, head_dim, generator=generator).to(BF16)
    metadata = AttentionMetadata.build([40], [length], [block_ids], 16)
    out = backend.build_plan(metadata, kv_cache, num_heads, head_dim**-0.5).attend(q, kv_cache[:, 0])
    keys, values = (
        kv_cache[block_ids, 0, which].transpose(1, 2).reshape(160, 2, head_dim)[:length].double() for which in (0, 1)
    )
    scores = torch.einsum("tkgh,lkh->tkgl", q.double().view(40, 2, group_size, head_dim), keys) * head_dim**-0.5
    unseen = torch.arange(length) > torch.arange(110, 150)[:, None]
    weights = scores.masked_fill(unseen[:, None, None], -math.inf).softmax(-1)
    expected = torch.einsum("tkgl,lkh->tkgh", weights, values).reshape(40, num_heads, head_dim)
    torch.testing.assert_close(out.double(), expected, rtol=2**-8, atol=2e-5)


@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_change_no_bit(num_threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(n, 192, generator=generator).to(BF16) for n in (1000, 90))
    kv_cache = torch.randn(40, 1, 2, 3, 16, 64, generator=generator).to(BF16)
    q = torch.randn(203, 9, 64, generator=generator).to(BF16)
    metadata = AttentionMetadata.build(
        [200, 1, 2], [300, 17, 180], [list(range(19)), [20, 21], list(range(22, 34))], 16
    )
    results = []
    for threads in (1, num_threads):
        backend = CppBackend(num_threads=threads)
        prepared = backend.prepare_linear(weight, None)
        plan = backend.build_plan(metadata, kv_cache, 9, 0.125)
        results.append(
            [
                *(backend.linear(rows[:n], prepared) for n in (1, 3, 90)),
                backend.silu_mul(rows),
                backend.rms_norm(rows, weight[0], 1e-6),
                *(plan.attend(q, kv_cache[:, 0]) for _ in range(20)),
            ]
        )
    for one, several in zip(*results, strict=True):
        assert torch.equal(one, several)


def test_norms_of_heads_inside_a_projection(backend: CppBackend) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, 8, 80, generator=generator).to(BF16)
    weight = torch.randn(80, generator=generator).to(BF16)
    part = backend.rms_norm(qkv[:, 2:5], weight, 1e-5)
    assert part.shape == (5, 3, 80)
    wide = qkv[:, 2:5].double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(part.double(), expected, rtol=2**-8, atol=2e-5)


def test_nonlinearity_of_extreme_gates(backend: CppBackend) -> None:
    gate = torch.tensor([[0.0, -0.0, 1e30, -1e30, math.inf, 90.0, -90.0, math.nan, -200.0]]).to(BF16)
    acted = backend.silu_mul(torch.cat((gate, torch.ones_like(gate)), 1))[0].float()
    assert acted[[0, 1, 3, 8]].abs().max() < 1e-5
    assert acted[2] == gate[0, 2]
    assert acted[4] == math.inf
    assert acted[5] == 90
    assert acted[7].isnan()


@pytest.mark.parametrize("bad_id", [3, -1, 2**40])
def test_block_ids_outside_the_pool_are_refused_and_touch_nothing(backend: CppBackend, bad_id: int) -> None:
    kv_cache = torch.zeros(3, 1, 2, 2, 16, 32, dtype=BF16)
    metadata = AttentionMetadata.build([1], [20], [[0, bad_id]], 16)
    plan = backend.build_plan(metadata, kv_cache, 4, 1.0)
    q, kv = torch.ones(1, 4, 32, dtype=BF16), torch.ones(1, 2, 32, dtype=BF16)
    with pytest.raises(IndexError, match="outside the KV memory"):
        plan.attend(q, kv_cache[:, 0])
    with pytest.raises(IndexError, match="outside the KV memory"):
        plan.rotate_and_store(q, kv, kv, Rotation(torch.ones(1, 32), torch.ones(1, 32)), kv_cache[:, 0])
    assert not kv_cache.any()
