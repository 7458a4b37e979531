"""Compiles each kernel in bfloat16 as its caller launches it, and prints what came out; needs no GPU.

Usage: ``python compile_kernels.py [compute capability]``, 90 (Hopper) unless given.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pdserve.kernels.gpu import attention, elementwise, linear, rotary

HEADS, KV_HEADS, DIM, BLOCK_SIZE, NUM_LAYERS, HIDDEN = 32, 8, 128, 16, 2, 576
BLOCK_STRIDE = NUM_LAYERS * 2 * KV_HEADS * BLOCK_SIZE * DIM
GROUP = HEADS // KV_HEADS
NOT_BF16 = {
    "num_rows": "i32", "table_width": "i32", "eps": "fp32", "scale": "fp32", "cos": "*fp32", "sin": "*fp32",
    "items": "*i64", "block_table": "*i64", "slot_mapping": "*i64",
}  # fmt: skip
ROTARY = [*[(HEADS + 2 * KV_HEADS) * DIM] * 3, HEADS, KV_HEADS, DIM, BLOCK_SIZE, BLOCK_STRIDE]
ATTENTION = [KV_HEADS, GROUP, DIM, BLOCK_SIZE, BLOCK_STRIDE, attention.ITEM_FIELDS, GROUP, DIM]
# The constants of each kernel in their order, and the stages of its launch.
KERNELS: list[tuple[Any, list[Any], int]] = [
    (linear.linear_kernel, [HIDDEN, 960, True, linear.BLOCK_ROWS, linear.BLOCK_OUT, linear.BLOCK_IN], 3),
    (elementwise.rms_norm_kernel, [HIDDEN, True, elementwise.ROWS, 1024], 3),
    (elementwise.silu_mul_kernel, [1536, elementwise.ROWS, elementwise.SILU_BLOCK], 3),
    (rotary.rotate_and_store_kernel, [*ROTARY, HEADS, KV_HEADS, DIM // 2], 3),
    (attention.attend_kernel, [*ATTENTION, attention.MIN_ROWS, attention.TILE_TOKENS], 2),
]


def compile_kernel(kernel: Any, constants: list[Any], num_stages: int, capability: int) -> str:
    """One line: the kernel, the target, and which tensor cores' instructions it has."""
    names = kernel.arg_names
    first_constant = len(names) - len(constants)
    signature = {name: NOT_BF16.get(name, "*bf16") for name in names[:first_constant]}
    signature |= dict.fromkeys(names[first_constant:], "constexpr")
    values = {(first_constant + i,): value for i, value in enumerate(constants)}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    options = {"num_warps": 4, "num_stages": num_stages, "enable_fp_fusion": False}
    source = ASTSource(kernel, signature, values, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    instructions = [name for name in ("wgmma", "mma.sync") if name in compiled.asm["ptx"]]
    return f"{kernel.fn.__name__} sm{capability} {' '.join(instructions)}"


if __name__ == "__main__":
    for entry in KERNELS:
        print(compile_kernel(*entry, int(sys.argv[1]) if len(sys.argv) > 1 else 90))
