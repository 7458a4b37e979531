"""The compiled kernels as torch operators: what torch asks of an operator holds, and the bits are the backend's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdserve.errors import ConfigError
from pdserve.kernels import torch_operators
from pdserve.kernels.base import AttentionMetadata
from pdserve.kernels.cpp_backend import CppBackend
from pdserve.kernels.cpp_step import CppStep

# Gradients are not theirs: the engine never asks for any.
CHECKS = ("test_schema", "test_faketensor")


@pytest.fixture(scope="module")
def backend() -> CppBackend:
    try:
        return CppBackend(num_threads=1)
    except ConfigError as error:
        pytest.skip(str(error))


def make(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def check(operator: torch.library.CustomOpDef, *arguments: object) -> None:
    results = torch.library.opcheck(operator, arguments, test_utils=CHECKS)
    assert set(results.values()) == {"SUCCESS"}


def test_linear(backend: CppBackend) -> None:
    weight = backend.prepare_linear(make(48, 64), make(48))
    for dtype in (torch.bfloat16, torch.float32):
        out = torch.zeros(5, 48, dtype=dtype)
        arguments = (make(5, 64, seed=1), weight.data, weight.scales, weight.bias, out, backend.variant, 1)
        check(torch_operators.linear, *arguments)
        torch.ops.pdserve.linear(*arguments)
        run = backend.linear if dtype == torch.bfloat16 else backend.linear_float32
        assert torch.equal(out, run(arguments[0], weight))


def test_norms_and_activation(backend: CppBackend) -> None:
    x, residual, weight = make(4, 64), make(4, 64, seed=1), make(64, seed=2)
    check(torch_operators.rms_norm, x, weight, 1e-5, backend.variant, 1)
    check(torch_operators.add_rms_norm, x, residual, weight, 1e-5, backend.variant, 1)
    check(torch_operators.silu_mul, x, backend.variant, 1)
    expected = torch.nn.functional.rms_norm(x.float(), (64,), weight.float(), 1e-5)
    actual = torch.ops.pdserve.rms_norm(x, weight, 1e-5, backend.variant, 1)
    assert torch.allclose(actual.float(), expected, rtol=1e-2, atol=1e-2)


def test_attention(backend: CppBackend) -> None:
    metadata = AttentionMetadata.build([3, 1], [3, 18], [[2], [0, 3]], 16)
    step = CppStep.of(metadata)
    tensors = [step.query_start_loc, step.seq_lens, step.block_table, step.slot_mapping]
    kv_layer = make(4, 2, 1, 16, 32).contiguous()
    q, k, v = make(4, 3, 32, seed=1), make(4, 1, 32, seed=2), make(4, 1, 32, seed=3)
    rotation = [torch.ones(4, 32), torch.zeros(4, 32)]
    check(torch_operators.rotate_and_store, q, k, v, rotation, kv_layer, tensors, backend.variant, 1)
    check(torch_operators.attend, q, kv_layer, tensors, 0.2, backend.variant, 1)
    rotated = torch.ops.pdserve.rotate_and_store(q, k, v, rotation, kv_layer, tensors, backend.variant, 1)
    assert torch.equal(rotated, q)  # a rotation by nothing
    assert torch.equal(kv_layer[2, 0, 0, :3], k[:3, 0])
    assert torch.equal(kv_layer[3, 1, 0, 1], v[3, 0])


def test_tracing_needs_no_kernel(backend: CppBackend) -> None:
    """A model of somebody else's can be traced through them."""

    def feed(x: Tensor) -> Tensor:
        return torch.ops.pdserve.silu_mul(x, backend.variant, 1) * 2

    graph = torch.fx.experimental.proxy_tensor.make_fx(feed, tracing_mode="fake")(make(2, 64))
    assert "pdserve.silu_mul" in graph.code
