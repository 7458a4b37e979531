from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pdserve.kernels.base import AttentionMetadata, KernelBackend, LinearWeight
from pdserve.kernels.invariance import KernelShapes, check_invariance
from pdserve.kernels.matmul import PlainMatmul
from pdserve.kernels.registry import DTYPES, get_backend
from pdserve.kernels.torch_backend import TorchBackend
from pdserve.kernels.torch_plan import TorchPlan


class SmallModel:
    def __init__(self, backend: KernelBackend) -> None:
        self.backend = backend

    def get_kernel_shapes(self) -> KernelShapes:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(96, 1536, generator=generator).to(self.backend.dtype)
        return KernelShapes(
            linears=(self.backend.prepare_linear(weight, None),),
            norm=torch.ones(96, dtype=self.backend.dtype),
            num_heads=6,
            num_kv_heads=2,
            head_dim=32,
            intermediate_size=128,
        )


class BatchDependentLinear(TorchBackend):
    def linear(self, x_TD: Tensor, weight: LinearWeight) -> Tensor:
        return super().linear(x_TD, weight) * (1 + 2**-5 * (x_TD.shape[0] > 4))


class BatchDependentSilu(TorchBackend):
    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        return super().silu_mul(gate_up_T2I) * (1 + 2**-5 * (gate_up_T2I.shape[0] == 1))


class ChunkDependentPlan(TorchPlan):
    def attend(self, q_TNH: Tensor, kv_layer: Tensor) -> Tensor:
        return super().attend(q_TNH, kv_layer) * (1 + 2**-5 * (q_TNH.shape[0] == 1))


class ChunkDependentAttention(TorchBackend):
    def build_plan(self, metadata: AttentionMetadata, kv_cache: Tensor, num_heads: int, scale: float) -> TorchPlan:
        return ChunkDependentPlan(metadata, kv_cache, num_heads, scale)


@pytest.mark.parametrize("name", ["auto", "reference"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_real_backends_pass(name: str, dtype: torch.dtype) -> None:
    assert check_invariance(SmallModel(get_backend(name, dtype)))


@pytest.mark.parametrize("quantization", ["int8", "w8a8"])
def test_quantised_weights_pass(quantization: str) -> None:
    assert check_invariance(SmallModel(get_backend("auto", torch.bfloat16, quantization)))


@pytest.mark.parametrize("broken", [BatchDependentLinear, BatchDependentSilu, ChunkDependentAttention])
def test_a_backend_whose_rows_depend_on_the_batch_fails(broken: type[TorchBackend]) -> None:
    assert not check_invariance(SmallModel(broken("broken", torch.float32, PlainMatmul())))
