"""How the compiled backend keeps the weights of a linear layer: bfloat16, or one of two int8 modes.

Both modes round a weight to the nearest of 255 steps of its output's scale, the largest weight being 127 of them, and
multiply integers, which are added exactly:

- ``int8``: inputs keep 16 bits, 65,535 steps of a scale for each token and 256 inputs; what that loses is below the
  rounding of outputs to bfloat16. A decode step reads half of the bytes.
- ``w8a8``: inputs keep 8 bits, 255 steps of a scale for each token and 64 inputs. The processor does twice as many of
  these products as of others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.kernels.base import LinearWeight
from pdserve.kernels.native_library import NativeLinear
from pdserve.kernels.weight_memory import WeightMemory

PANEL_OUTPUTS = 32
"""Outputs that are packed together; kPanel in csrc/gemm.h."""


@dataclass(frozen=True)
class LinearFormat:
    """One way to keep weights.

    Attributes:
        native: its number, ``WeightFormat`` of csrc/api.h.
        dtype: of an element.
        step_inputs: inputs whose weights lie side by side.
        has_scales: whether outputs have scales.
    """

    native: int
    dtype: torch.dtype
    step_inputs: int
    has_scales: bool

    def allocate(
        self, memory: WeightMemory, out_features: int, in_features: int, bias_O: Tensor | None
    ) -> LinearWeight:
        """Memory for a weight [O, D] in this format."""
        outputs = -(-out_features // PANEL_OUTPUTS) * PANEL_OUTPUTS
        inputs = -(-in_features // self.step_inputs) * self.step_inputs
        return LinearWeight(
            data=memory.allocate(outputs * inputs, self.dtype),
            bias=bias_O,
            in_features=in_features,
            out_features=out_features,
            scales=memory.allocate(outputs, torch.float32) if self.has_scales else None,
        )


LINEAR_FORMATS = {
    "none": LinearFormat(0, torch.bfloat16, 2, has_scales=False),
    "int8": LinearFormat(1, torch.int8, 4, has_scales=True),
    "w8a8": LinearFormat(2, torch.uint8, 4, has_scales=True),
}
"""By the name of the quantisation."""
_NATIVE = {entry.dtype: entry.native for entry in LINEAR_FORMATS.values()}


def build_linear(weight: LinearWeight) -> NativeLinear:
    """A weight as the kernels read it; the structure points into it."""
    return NativeLinear(
        panels=weight.data.data_ptr(),
        scales=None if weight.scales is None else weight.scales.data_ptr(),
        bias=None if weight.bias is None else weight.bias.data_ptr(),
        in_features=weight.in_features,
        out_features=weight.out_features,
        format=_NATIVE[weight.data.dtype],
    )
