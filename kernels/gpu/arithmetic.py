"""Products and rounding inside kernels, the same on a GPU and in Triton's interpreter.

The interpreter (3.9) multiplies the bit patterns of bfloat16 numbers and cuts where a GPU rounds. What it computes
here instead has the same exact products, sums of float32, and rounding to nearest even.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Whether kernels run in Triton's interpreter (TRITON_INTERPRET=1), on CPU tensors."""


@triton.jit
def dot(a, b, acc):
    """``acc + a @ b`` in float32; float32 operands are not shortened to TF32."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """Float32 ``x`` in ``dtype``, to nearest even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)
