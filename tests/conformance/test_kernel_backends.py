"""What every kernel backend must do: agree with a float64 reference, and give each row the same bits in any company.

A new backend joins by being registered; nothing here is written for one of them. Those of GPUs run on the machine's
GPU. Where there is none, Triton's interpreter runs them on CPU tensors, far slower than anything else: it gets a few
of the cases.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.errors import ConfigError
from pdserve.kernels.base import AttentionMetadata, KernelBackend, Rotation
from pdserve.kernels.cpp_backend import CppBackend
from pdserve.kernels.native_library import get_supported_variants
from pdserve.kernels.registry import CPP, DTYPES, backend_names, get_backend

NUM_LAYERS, LAYER = 3, 1
HAS_GPU = torch.cuda.is_available()

REGISTERED = [(name, dtype) for name in backend_names() for dtype in DTYPES if name != CPP or dtype == torch.bfloat16]
# The first variant is what the registry gives.
OTHER_VARIANTS = [(variant.name, torch.bfloat16) for variant in get_supported_variants()[1:]]
TRITON = [("triton", dtype) for dtype in DTYPES]
BACKENDS = REGISTERED + OTHER_VARIANTS + TRITON


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> KernelBackend:
    name, dtype = request.param
    try:
        if request.param in TRITON:
            return get_backend(name, dtype, device="cuda") if HAS_GPU else build_interpreted(dtype)
        return CppBackend(name) if request.param in OTHER_VARIANTS else get_backend(name, dtype)
    except ConfigError as error:
        pytest.skip(f"does not run here: {error}")


def build_interpreted(dtype: torch.dtype) -> KernelBackend:
    pytest.importorskip("triton", reason="Triton is not installed: pdserve[gpu]")
    from pdserve.kernels.gpu.triton_backend import TritonBackend

    return TritonBackend(dtype, torch.device("cpu"))


def for_each_backend(names: str = "", cases: Sequence[Any] = ((),), few: Sequence[Any] = ()) -> pytest.MarkDecorator:
    """Every backend with every case of the arguments ``names``; ``few`` are those that an interpreted one gets."""
    params = []
    for entry in BACKENDS:
        chosen = cases if HAS_GPU or entry not in TRITON else few
        params += [(entry, *(case if isinstance(case, tuple) else (case,))) for case in chosen]
    every_name = ["backend", *names.split()]
    return pytest.mark.parametrize(every_name, params, indirect=["backend"], ids=str)


def pick(backend: KernelBackend, values: Sequence[int], few: Sequence[int]) -> Sequence[int]:
    """The values to try: few in an interpreter."""
    return few if backend.name == "triton" and not HAS_GPU else values


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16


class Contexts:
    """Some requests' queries, keys and values, and a pool that holds their KV in shuffled blocks, NaN elsewhere."""

    def __init__(
        self, shape: Shape, seq_lens: list[int], dtype: torch.dtype, kv_dtype: torch.dtype, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape, self.seq_lens, self.dtype = shape, seq_lens, dtype
        self.q = [torch.randn(n, shape.num_heads, shape.head_dim, generator=generator).to(dtype) for n in seq_lens]
        self.k, self.v = (
            [torch.randn(n, shape.num_kv_heads, shape.head_dim, generator=generator).to(kv_dtype) for n in seq_lens]
            for _ in range(2)
        )
        counts = [-(-n // shape.block_size) for n in seq_lens]
        free = torch.randperm(sum(counts) + 5, generator=generator).tolist()
        self.block_ids = [[free.pop() for _ in range(count)] for count in counts]
        pool = (sum(counts) + 5, NUM_LAYERS, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self.kv_cache = torch.full(pool, math.nan, dtype=kv_dtype)
        for blocks, k, v in zip(self.block_ids, self.k, self.v, strict=True):
            for position, (key, value) in enumerate(zip(k, v, strict=True)):
                block, offset = blocks[position // shape.block_size], position % shape.block_size
                self.kv_cache[block, LAYER, 0, :, offset] = key
                self.kv_cache[block, LAYER, 1, :, offset] = value

    def attend(self, backend: KernelBackend, spans: list[tuple[int, int, int]]) -> list[Tensor]:
        """One step that computes tokens ``[start, stop)`` of each (request, start, stop)."""
        metadata = AttentionMetadata.build(
            query_lens=[stop - start for _, start, stop in spans],
            seq_lens=[stop for _, _, stop in spans],
            block_ids=[self.block_ids[r] for r, _, _ in spans],
            block_size=self.shape.block_size,
        )
        kv_cache = self.kv_cache.to(backend.device)
        plan = backend.build_plan(metadata, kv_cache, self.shape.num_heads, self.shape.head_dim**-0.5)
        packed = torch.cat([self.q[r][start:stop] for r, start, stop in spans]).to(backend.device)
        out = plan.attend(packed, kv_cache[:, LAYER])
        assert out.dtype == self.dtype
        return list(torch.split(out.cpu(), [stop - start for _, start, stop in spans]))

    def attend_whole(self, backend: KernelBackend, request: int, chunk: int) -> Tensor:
        """All of a request's tokens, ``chunk`` of them a step."""
        length = self.seq_lens[request]
        return torch.cat(
            [self.attend(backend, [(request, p, min(p + chunk, length))])[0] for p in range(0, length, chunk)]
        )

    def expect(self, request: int) -> Tensor:
        """Attention of all of a request's tokens in float64."""
        group = self.shape.num_heads // self.shape.num_kv_heads
        q, k, v = (x[request].double().transpose(0, 1) for x in (self.q, self.k, self.v))
        k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        scores = q @ k.transpose(1, 2) * self.shape.head_dim**-0.5
        length = scores.shape[-1]
        scores.masked_fill_(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
        return (scores.softmax(-1) @ v).transpose(0, 1)


def make_random(backend: KernelBackend, generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).to(backend.device, backend.dtype)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Within float32 rounding of sums, or half a unit of bfloat16 on top of it."""
    relative = 2**-8 if actual.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(actual.double(), expected, rtol=relative, atol=2e-5)


GROUPINGS = [Shape(2, 2, 32), Shape(6, 3, 64), Shape(9, 3, 64), Shape(8, 2, 16), Shape(7, 1, 128), Shape(4, 2, 24, 8)]


GROUPINGS_AND_DTYPES = [(shape, dtype) for shape in GROUPINGS for dtype in DTYPES]


@for_each_backend("shape kv_dtype", GROUPINGS_AND_DTYPES, few=[(GROUPINGS[2], DTYPES[0]), (GROUPINGS[5], DTYPES[1])])
def test_attention_of_a_mixed_step_agrees_with_float64(
    backend: KernelBackend, shape: Shape, kv_dtype: torch.dtype
) -> None:
    contexts = Contexts(shape, [1, 15, 16, 17, 127, 128, 129, 300, 290], backend.dtype, kv_dtype)
    spans = [(0, 0, 1), (1, 0, 15), (2, 15, 16), (3, 3, 17), (4, 126, 127), (5, 127, 128), (6, 100, 129)]
    spans += [(7, 299, 300), (8, 5, 290)]
    for (request, start, stop), result in zip(spans, contexts.attend(backend, spans), strict=True):
        assert_near(result, contexts.expect(request)[start:stop])


@for_each_backend(few=[()])
def test_attention_with_large_scores_agrees_with_float64(backend: KernelBackend) -> None:
    contexts = Contexts(Shape(4, 2, 64), [300], backend.dtype, backend.dtype)
    contexts.q[0].mul_(16)
    spans = [(0, 0, 300)]
    assert_near(contexts.attend(backend, spans)[0], contexts.expect(0))
    assert_near(contexts.attend(backend, [(0, 299, 300)])[0], contexts.expect(0)[299:])


@for_each_backend("block_size", [4, 32, 256], few=[256])
def test_any_block_size_agrees_with_float64(backend: KernelBackend, block_size: int) -> None:
    contexts = Contexts(Shape(4, 2, 32, block_size), [300, 130], backend.dtype, backend.dtype)
    results = contexts.attend(backend, [(0, 20, 300), (1, 129, 130)])
    assert_near(results[0], contexts.expect(0)[20:])
    assert_near(results[1], contexts.expect(1)[129:])


@for_each_backend("shape kv_dtype", GROUPINGS_AND_DTYPES, few=[(GROUPINGS[4], DTYPES[0])])
def test_chunking_changes_no_bit(backend: KernelBackend, shape: Shape, kv_dtype: torch.dtype) -> None:
    contexts = Contexts(shape, [277], backend.dtype, kv_dtype)
    whole = contexts.attend_whole(backend, 0, 277)
    for chunk in pick(backend, (1, 16, 64, 100), few=(64,)):
        assert torch.equal(contexts.attend_whole(backend, 0, chunk), whole), f"chunks of {chunk} differ"


@for_each_backend("shape", GROUPINGS, few=[GROUPINGS[4]])
def test_neighbours_change_no_bit(backend: KernelBackend, shape: Shape) -> None:
    seq_lens = [261, *(1 + 37 * i % 400 for i in pick(backend, range(32), few=(0, 1, 3, 7)))]
    contexts = Contexts(shape, seq_lens, backend.dtype, backend.dtype)
    alone = contexts.attend(backend, [(0, 260, 261)])[0]
    others = [(r, seq_lens[r] - 1, seq_lens[r]) for r in range(1, len(seq_lens))]
    assert torch.equal(contexts.attend(backend, [(0, 260, 261), *others])[0], alone)
    assert torch.equal(contexts.attend(backend, [*others, (0, 260, 261)])[-1], alone)
    chunks = [(r, 0, seq_lens[r]) for r in range(1, 5)]
    assert torch.equal(contexts.attend(backend, [*chunks, (0, 260, 261), *others])[4], alone)


@for_each_backend()
def test_block_ids_and_what_lies_behind_the_last_token_change_no_bit(backend: KernelBackend) -> None:
    shape, lens = Shape(6, 3, 64), [203, 31]
    results = []
    for filler in (math.nan, math.inf, 0.0):
        contexts = Contexts(shape, lens, backend.dtype, backend.dtype)
        contexts.kv_cache[contexts.kv_cache.isnan()] = filler
        order = torch.randperm(contexts.kv_cache.shape[0])
        contexts.kv_cache = contexts.kv_cache[order]
        place = {int(old): new for new, old in enumerate(order)}
        contexts.block_ids = [[place[b] for b in blocks] for blocks in contexts.block_ids]
        results.append(torch.cat(contexts.attend(backend, [(0, 202, 203), (1, 10, 31), (0, 60, 203), (1, 30, 31)])))
    assert results[0].isfinite().all()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@for_each_backend()
def test_two_threads_change_no_bit(backend: KernelBackend, restored_threads: None) -> None:
    generator = torch.Generator().manual_seed(3)
    contexts = Contexts(Shape(7, 1, 64), [400, 30], backend.dtype, backend.dtype)
    weight = backend.prepare_linear(make_random(backend, generator, 960, 1536), None)
    rows = make_random(backend, generator, 301, 1536)
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        parts = contexts.attend(backend, [(0, 399, 400), (1, 0, 30), (0, 91, 400)])
        parts += [backend.linear(rows[:n], weight) for n in (1, 2, 5, 9, 301)]
        parts += [backend.silu_mul(rows), backend.rms_norm(rows, rows[0], 1e-6)]
        results.append(parts)
    for one, two in zip(*results, strict=True):
        assert torch.equal(one, two)


# The sum over 1,536 and more inputs is where libraries switch to another order for a single row.
LINEAR_SHAPES = [(64, 192), (576, 960), (1536, 576), (4096, 256), (200, 72)]


@for_each_backend(
    "in_features out_features has_bias",
    [(*shape, has_bias) for shape in LINEAR_SHAPES for has_bias in (False, True)],
    few=[(576, 96, True), (200, 72, False)],
)
def test_linear_agrees_with_float64_and_rows_are_independent(
    backend: KernelBackend, in_features: int, out_features: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(in_features)
    weight = make_random(backend, generator, out_features, in_features) / in_features**0.5
    bias = make_random(backend, generator, out_features) if has_bias else None
    rows = make_random(backend, generator, 600, in_features)
    expected = rows.double() @ weight.double().T + (bias.double() if bias is not None else 0)
    prepared = backend.prepare_linear(weight, bias)
    whole = backend.linear(rows, prepared)
    assert whole.dtype == backend.dtype
    assert_near(whole, expected)
    for count in pick(backend, (1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 64, 257), few=(1, 257)):
        for first in (0, 600 - count):
            part = backend.linear(rows[first : first + count], prepared)
            assert torch.equal(part, whole[first : first + count]), f"{count} rows from {first} differ"


@for_each_backend("width", [64, 96, 576, 1536], few=[96])
def test_norms_and_nonlinearity_agree_with_float64_and_rows_are_independent(backend: KernelBackend, width: int) -> None:
    generator = torch.Generator().manual_seed(width)
    x, residual, gate_up = (make_random(backend, generator, 300, n) for n in (width, width, 2 * width))
    weight = make_random(backend, generator, width)

    def norm64(values: Tensor) -> Tensor:
        wide = values.double()
        return wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    total = residual.clone()
    added = backend.add_rms_norm(x, total, weight, 1e-5)
    assert torch.equal(total, residual + x)
    gate, up = gate_up.double().chunk(2, -1)
    acted = backend.silu_mul(gate_up)
    assert_near(backend.rms_norm(x, weight, 1e-5), norm64(x))
    assert_near(added, norm64(total))
    # bfloat16 rounds silu's result and the product.
    half_units = 2**-7 if backend.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(acted.double(), gate * gate.sigmoid() * up, rtol=half_units, atol=2e-5)
    for count in pick(backend, (1, 2, 3, 17, 100), few=(3,)):
        part = slice(5, 5 + count)
        assert torch.equal(backend.rms_norm(x[part], weight, 1e-5), backend.rms_norm(x, weight, 1e-5)[part])
        assert torch.equal(backend.add_rms_norm(x[part], residual[part].clone(), weight, 1e-5), added[part])
        assert torch.equal(backend.silu_mul(gate_up[part]), acted[part])


@for_each_backend("kv_dtype", DTYPES, few=[DTYPES[0]])
def test_rotation_and_store(backend: KernelBackend, kv_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    block_ids, seq_lens, query_lens = [[4, 1, 6], [0]], [37, 3], [20, 1]
    metadata = AttentionMetadata.build(query_lens, seq_lens, block_ids, 16)
    qkv = make_random(backend, generator, 21, 10, 32)
    q, k, v = torch.split(qkv, [6, 2, 2], 1)
    angles = (torch.rand(21, 16, generator=generator) * 6).to(backend.device)
    cos, sin = angles.cos(), angles.sin()
    rotation = Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    kv_cache = torch.full((7, NUM_LAYERS, 2, 2, 16, 32), math.nan, dtype=kv_dtype, device=backend.device)
    plan = backend.build_plan(metadata, kv_cache, 6, 1.0)
    rotated = plan.rotate_and_store(q, k, v, rotation, kv_cache[:, LAYER])

    def rotate64(x: Tensor) -> Tensor:
        a, b = x.double().chunk(2, -1)
        c, s = cos[:, None].double(), sin[:, None].double()
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    assert_near(rotated, rotate64(q))
    written = 0
    for index, (request, position) in enumerate([*((0, p) for p in range(17, 37)), (1, 2)]):
        slot = kv_cache[block_ids[request][position // 16], LAYER, :, :, position % 16]
        assert_near(slot[0], rotate64(k)[index])
        assert torch.equal(slot[1], v[index].to(kv_dtype))
        written += slot.numel()
    assert kv_cache.isnan().sum() == kv_cache.numel() - written
    row = AttentionMetadata.build([1], [37], block_ids[:1], 16)
    alone = backend.build_plan(row, kv_cache, 6, 1.0).rotate_and_store(
        q[19:20], k[19:20], v[19:20], Rotation(rotation.cos_TH[19:20], rotation.sin_TH[19:20]), kv_cache[:, LAYER]
    )
    assert torch.equal(alone, rotated[19:20])
