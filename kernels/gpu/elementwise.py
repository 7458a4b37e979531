"""Norms and the nonlinearity: computed in float32 and rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.gpu.arithmetic import INTERPRETED, round_to

# An interpreted program costs milliseconds whatever its size.
ROWS = 64 if INTERPRETED else 1
SILU_BLOCK = 1024


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    num_rows,
    eps,
    WIDTH: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Norm of some rows; with a residual, ``residual += x`` first, rounded, and the norm of that."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    place = rows[:, None] * WIDTH + columns[None, :]
    value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        value += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        total = round_to(value, residual.dtype.element_ty)
        tl.store(residual + place, total, mask=mask)
        value = total.to(tl.float32)
    factor = tl.rsqrt(tl.sum(value * value, axis=1) / WIDTH + eps)
    scale = tl.load(weight + columns, mask=columns < WIDTH, other=0.0).to(tl.float32)
    normed = value * factor[:, None] * scale[None, :]
    tl.store(out + place, round_to(normed, out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def silu_mul_kernel(gate_up, out, num_rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A stretch of some rows of ``silu(gate) * up``; grid: (row tiles, stretches)."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    place = rows[:, None] * (2 * WIDTH) + columns[None, :]
    gate = tl.load(gate_up + place, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + WIDTH + place, mask=mask, other=0.0).to(tl.float32)
    product = gate / (1.0 + tl.exp(-gate)) * up
    target = out + rows[:, None] * WIDTH + columns[None, :]
    tl.store(target, round_to(product, out.dtype.element_ty), mask=mask)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Norm over the last axis of ``x``, or of ``residual += x`` where there is one; all contiguous."""
    width = x.shape[-1]
    num_rows = x.numel() // width
    out = torch.empty_like(x)
    rms_norm_kernel[(triton.cdiv(num_rows, ROWS),)](
        x,
        x if residual is None else residual,
        weight,
        out,
        num_rows,
        eps,
        width,
        residual is not None,
        ROWS,
        triton.next_power_of_2(width),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def silu_mul(gate_up_T2I: Tensor) -> Tensor:
    """``silu(gate) * up`` where the last axis, contiguous, holds gate, then up: [T, I]."""
    num_rows, width = gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2
    out_TI = gate_up_T2I.new_empty(num_rows, width)
    grid = (triton.cdiv(num_rows, ROWS), triton.cdiv(width, SILU_BLOCK))
    silu_mul_kernel[grid](gate_up_T2I, out_TI, num_rows, width, ROWS, SILU_BLOCK, num_warps=4, enable_fp_fusion=False)
    return out_TI
