"""The pure-torch backend: the reference that every other backend is compared with, and good enough to serve.

Norms, rotations, softmax and the nonlinearity are computed in float32 and rounded to the backend's dtype once.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.kernels.base import AttentionMetadata, LinearWeight, Rotation, Tables
from pdserve.kernels.matmul import Matmul
from pdserve.kernels.row_maxima import find_row_maxima
from pdserve.kernels.tiles import TILE_TOKENS
from pdserve.kernels.torch_plan import TorchPlan

VECTOR_ELEMENTS = 64
"""Elements that torch's vector loops take at once (AVX-512, bfloat16); what is left over runs in scalar code."""


class TorchBackend:
    """`pdserve.kernels.base.KernelBackend` in torch operations on CPU.

    Args:
        name: the registry's name for this combination.
        dtype: of weights and activations, bfloat16 or float32.
        matmul: how linear layers are computed.
    """

    def __init__(self, name: str, dtype: torch.dtype, matmul: Matmul) -> None:
        self._name = name
        self._dtype = dtype
        self._matmul = matmul
        self._numerics = self._describe_numerics()

    @property
    def name(self) -> str:
        """See `KernelBackend`."""
        return self._name

    @property
    def dtype(self) -> torch.dtype:
        """See `KernelBackend`."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """See `KernelBackend`."""
        return torch.device("cpu")

    @property
    def numerics(self) -> str:
        """See `KernelBackend`."""
        return self._numerics

    def prepare_linear(self, weight_OD: Tensor, bias_O: Tensor | None) -> LinearWeight:
        """See `KernelBackend.prepare_linear`."""
        return self._matmul.prepare(weight_OD, bias_O)

    def prepare_embedding(self, table_VD: Tensor, tied_head: LinearWeight | None) -> LinearWeight:
        """See `KernelBackend.prepare_embedding`: kept as it is."""
        return LinearWeight(table_VD, None, table_VD.shape[1], table_VD.shape[0])

    def look_up(self, tables: Tables, token_ids_T: Tensor, positions_T: Tensor) -> tuple[Tensor, Rotation]:
        """See `KernelBackend.look_up`."""
        return tables.embedding.data.index_select(0, token_ids_T), tables.rotation.select(positions_T)

    def linear(self, x_TD: Tensor, weight: LinearWeight) -> Tensor:
        """See `KernelBackend.linear`."""
        return self._matmul.multiply(x_TD, weight)

    def linear_float32(self, x_TD: Tensor, weight: LinearWeight, out_TO: Tensor | None = None) -> Tensor:
        """See `KernelBackend.linear_float32`: rounded to the backend's dtype, as its matrix library gives it."""
        product_TO = self.linear(x_TD, weight)
        return product_TO.float() if out_TO is None else out_TO.copy_(product_TO)

    def linear_argmax(self, x_TD: Tensor, weight: LinearWeight) -> tuple[Tensor, Tensor]:
        """See `KernelBackend.linear_argmax`."""
        return find_row_maxima(self.linear_float32(x_TD, weight))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `KernelBackend.rms_norm`."""
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """See `KernelBackend.add_rms_norm`."""
        return self.rms_norm(residual_TD.add_(x_TD), weight_D, eps)

    def build_plan(self, metadata: AttentionMetadata, kv_cache: Tensor, num_heads: int, scale: float) -> TorchPlan:
        """See `KernelBackend.build_plan`."""
        return TorchPlan(metadata, kv_cache, num_heads, scale)

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        """See `KernelBackend.silu_mul`.

        torch's bfloat16 ``silu`` gives one of the 65,536 inputs another result in scalar code than in vector code,
        its float32 ``silu`` many; ``exp`` and division give the same in both, at three times the cost.
        """
        gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
        if self._dtype == torch.bfloat16 and gate_TI.shape[-1] % VECTOR_ELEMENTS == 0:
            return functional.silu(gate_TI).mul_(up_TI)
        wide_TI = gate_TI.float()
        wide_TI = wide_TI / torch.neg(wide_TI).exp_().add_(1)
        return wide_TI.mul_(up_TI).to(self._dtype)

    def _describe_numerics(self) -> str:
        dtype = str(self._dtype).removeprefix("torch.")
        parts = ("torch", torch.__version__, self._matmul.name, dtype, f"tile{TILE_TOKENS}", self._probe_digest())
        return "/".join(parts)

    def _probe_digest(self) -> str:
        """Digest of small fixed products and functions: CPUs for which torch picks other code differ here.

        The inputs are exact fractions, the same on any machine.
        """
        values = (torch.arange(48 * 512) * 2654435761 % 65521).view(48, 512).to(torch.float64) / 65521 - 0.5
        inputs, weight = values[:16].to(self._dtype), values[16:].to(self._dtype)
        product = self.linear(inputs, self.prepare_linear(weight, None))
        norm = self.rms_norm(inputs, weight[0], 1e-6)
        wide = values[:32].float().view(2, 16, 512)
        scores = torch.bmm(wide, wide.transpose(1, 2)).exp()
        results = (product, norm, self.silu_mul(inputs), scores, torch.bmm(scores, wide))
        content = b"".join(result.contiguous().view(torch.uint8).numpy().tobytes() for result in results)
        return hashlib.sha256(content).hexdigest()[:8]
