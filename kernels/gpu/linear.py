"""Linear layers: each output has one accumulator that takes its inputs in tiles, in order, whatever the number of rows.

cuBLAS chooses its kernel, and with it the order of a sum, by the shape of a product: a decode step of one row and a
prompt's chunk would differ. The tile here is the same for both, at a cost in speed for one of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.base import LinearWeight
from pdserve.kernels.gpu.arithmetic import INTERPRETED, dot, round_to

# An interpreted program costs milliseconds whatever its size.
BLOCK_ROWS, BLOCK_OUT, BLOCK_IN = (128, 256, 256) if INTERPRETED else (64, 64, 64)


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x,
    weight,
    bias,
    out,
    num_rows,
    IN_FEATURES: tl.constexpr,
    OUT_FEATURES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """One tile of ``out`` [rows, outputs]; grid: (row tiles, output tiles)."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    outs = tl.program_id(1).to(tl.int64) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    row_mask, out_mask = rows < num_rows, outs < OUT_FEATURES
    acc = tl.zeros((BLOCK_ROWS, BLOCK_OUT), tl.float32)
    for start in range(0, IN_FEATURES, BLOCK_IN):
        ins = start + tl.arange(0, BLOCK_IN)
        in_mask = ins < IN_FEATURES
        x_mask = row_mask[:, None] & in_mask[None, :]
        x_tile = tl.load(x + rows[:, None] * IN_FEATURES + ins[None, :], mask=x_mask, other=0.0)
        weight_mask = in_mask[:, None] & out_mask[None, :]
        weight_tile = tl.load(weight + outs[None, :] * IN_FEATURES + ins[:, None], mask=weight_mask, other=0.0)
        acc = dot(x_tile, weight_tile, acc)
    if HAS_BIAS:
        acc += tl.load(bias + outs, mask=out_mask, other=0.0).to(tl.float32)[None, :]
    mask = row_mask[:, None] & out_mask[None, :]
    tl.store(out + rows[:, None] * OUT_FEATURES + outs[None, :], round_to(acc, out.dtype.element_ty), mask=mask)


def multiply(x_TD: Tensor, weight: LinearWeight, out_dtype: torch.dtype) -> Tensor:
    """``x @ weight.T + bias``: [T, O] in ``out_dtype``, rounded once from float32.

    Args:
        x_TD: contiguous, at an address that Triton takes as aligned.
        weight: ``data`` is [O, D], contiguous.
        out_dtype: of the result.
    """
    num_rows = x_TD.shape[0]
    out_TO = torch.empty(num_rows, weight.out_features, dtype=out_dtype, device=x_TD.device)
    grid = (triton.cdiv(num_rows, BLOCK_ROWS), triton.cdiv(weight.out_features, BLOCK_OUT))
    linear_kernel[grid](
        x_TD,
        weight.data,
        weight.data if weight.bias is None else weight.bias,
        out_TO,
        num_rows,
        weight.in_features,
        weight.out_features,
        weight.bias is not None,
        BLOCK_ROWS,
        BLOCK_OUT,
        BLOCK_IN,
        num_warps=4,
        enable_fp_fusion=False,
        num_stages=3,
    )
    return out_TO
