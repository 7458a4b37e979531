"""Matrix products whose rows do not depend on how many rows there are.

Measured with torch 2.13 on AVX-512: oneDNN's products give equal rows for any count from 2 on, in bfloat16 and float32
and for 1 to 4 threads, but a single row takes another path (it splits the sum over D, visible from D = 1,536 on).
MKL's float32 products need 4 rows, and more where threads share them. So few rows are made more.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.errors import ConfigError
from pdserve.kernels.base import LinearWeight

PLAIN_ROW_TILE = 16


class Matmul(Protocol):
    """How a `TorchBackend` computes linear layers."""

    name: str

    def prepare(self, weight_OD: Tensor, bias_O: Tensor | None) -> LinearWeight:
        """See `KernelBackend.prepare_linear`."""
        ...

    def multiply(self, x_TD: Tensor, weight: LinearWeight) -> Tensor:
        """See `KernelBackend.linear`."""
        ...


class PlainMatmul:
    """torch's own ``linear``: runs everywhere."""

    name = "plain"

    def prepare(self, weight_OD: Tensor, bias_O: Tensor | None) -> LinearWeight:
        """Keep the weight as it is."""
        return LinearWeight(weight_OD, bias_O, weight_OD.shape[1], weight_OD.shape[0])

    def multiply(self, x_TD: Tensor, weight: LinearWeight) -> Tensor:
        """Multiply, the rows padded to a multiple of 16."""
        rows = x_TD.shape[0]
        padded = functional.pad(x_TD, (0, 0, 0, -rows % PLAIN_ROW_TILE))
        return functional.linear(padded, weight.data, weight.bias)[:rows]


class OneDnnMatmul:
    """oneDNN's ``linear`` on weights packed once: up to twice as fast for few rows.

    torch has no public name for packed weights; these two operators are what its own compiler emits.
    """

    name = "onednn"

    @staticmethod
    def explain_missing(dtype: torch.dtype) -> str | None:
        """Why it cannot run here, or None if it can."""
        if not torch._C._has_mkldnn:
            return "this torch is built without oneDNN"
        if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
            return f"torch {torch.__version__} has no operator mkldnn::_reorder_linear_weight"
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "this CPU has no bfloat16 instructions that oneDNN can use"
        return None

    def prepare(self, weight_OD: Tensor, bias_O: Tensor | None) -> LinearWeight:
        """Pack the weight."""
        packed = torch.ops.mkldnn._reorder_linear_weight(weight_OD, None)
        return LinearWeight(packed, bias_O, weight_OD.shape[1], weight_OD.shape[0])

    def multiply(self, x_TD: Tensor, weight: LinearWeight) -> Tensor:
        """Multiply, a single row twice."""
        rows_TD = torch.cat((x_TD, x_TD)) if x_TD.shape[0] == 1 else x_TD
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows_TD, weight.data, weight.bias, "none", [], "")
        return product[: x_TD.shape[0]]


def build_matmul(name: str, dtype: torch.dtype) -> Matmul:
    """The matrix product called ``name``.

    Raises:
        ConfigError: it cannot run here; the message names what is missing.
    """
    if name == PlainMatmul.name:
        return PlainMatmul()
    missing = OneDnnMatmul.explain_missing(dtype)
    if missing is not None:
        raise ConfigError(f"kernel backend 'onednn' cannot run {dtype} here: {missing}; use 'reference'")
    return OneDnnMatmul()
