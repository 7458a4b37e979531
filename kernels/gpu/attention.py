"""Paged attention over the block-major cache: prompts' chunks and decode rows in one launch of one kernel.

Online softmax over fixed key tiles from position 0 (https://arxiv.org/abs/2205.14135). A program takes some tokens of
one request with all query heads of one KV head, folded into rows; what it does to a row is the same whether the row is
a decode step or the middle of a chunk. A tile that a row does not see changes nothing, exactly: its probabilities are 0
and what was summed before it is multiplied by 1.

A long context is not shared out among programs: a sum cut by how busy the device is would differ from step to step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.gpu.arithmetic import INTERPRETED, dot, round_to
from pdserve.kernels.gpu.step import ITEM_FIELDS, DeviceStep

# An interpreted program costs milliseconds whatever its size.
MIN_ROWS, TILE_TOKENS = (256, 128) if INTERPRETED else (64, 64)
MIN_DOT = 16
"""The smallest side that a matrix product takes."""


@triton.jit
def add_weighted(acc, p, v):
    """``acc + p @ v``; for bfloat16 values, p in two bfloat16 parts, which hold it to 16 bits."""
    if v.dtype == tl.float32:
        return dot(p, v, acc)
    high = round_to(p, v.dtype)
    low = round_to(p - high.to(tl.float32), v.dtype)
    return dot(low, v, dot(high, v, acc))


@triton.jit(do_not_specialize=["table_width"])
def attend_kernel(
    q,
    kv_layer,
    items,
    block_table,
    out,
    scale,
    table_width,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    ITEM_FIELDS: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One item and KV head; see `pdserve.kernels.gpu.step` for items. Grid: (items, KV heads)."""
    item = items + tl.program_id(0) * ITEM_FIELDS
    request, first, num_tokens, position = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    kv_head = tl.program_id(1)
    token, head = tl.arange(0, ROWS) // PADDED_GROUP, tl.arange(0, ROWS) % PADDED_GROUP
    dims = tl.arange(0, PADDED_DIM)
    dim_mask = dims < HEAD_DIM
    row_mask = ((token < num_tokens) & (head < GROUP))[:, None] & dim_mask[None, :]
    row = (first + token) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + head
    place = row[:, None] * HEAD_DIM + dims[None, :]
    q_tile = tl.load(q + place, mask=row_mask, other=0.0)
    keys_base = kv_layer + kv_head * BLOCK_SIZE * HEAD_DIM
    values_base = keys_base + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    if kv_layer.dtype.element_ty == tl.float32:
        q_tile = q_tile.to(tl.float32)

    maximum = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, PADDED_DIM), tl.float32)
    limit = position + num_tokens
    for start in range(0, limit, TILE):
        keys = start + tl.arange(0, TILE)
        exists = keys < limit
        block = tl.load(block_table + request * table_width + keys // BLOCK_SIZE, mask=exists, other=0)
        offset = block * BLOCK_STRIDE + (keys % BLOCK_SIZE) * HEAD_DIM
        k_mask, v_mask = dim_mask[:, None] & exists[None, :], exists[:, None] & dim_mask[None, :]
        k_tile = tl.load(keys_base + offset[None, :] + dims[:, None], mask=k_mask, other=0.0).to(q_tile.dtype)
        v_tile = tl.load(values_base + offset[:, None] + dims[None, :], mask=v_mask, other=0.0).to(q_tile.dtype)
        scores = dot(q_tile, k_tile, tl.zeros((ROWS, TILE), tl.float32)) * scale
        seen = (keys[None, :] <= (position + token)[:, None]) & exists[None, :]
        scores = tl.where(seen, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        factor = tl.exp(maximum - new_maximum)
        p = tl.exp(scores - new_maximum[:, None])
        total = total * factor + tl.sum(p, axis=1)
        acc = add_weighted(acc * factor[:, None], p, v_tile)
        maximum = new_maximum
    # The largest score's own share is 1; only a row without any key has less, and gets 0.
    total = tl.maximum(total, 1.0)
    tl.store(out + place, round_to(acc / total[:, None], out.dtype.element_ty), mask=row_mask)


def count_item_tokens(group_size: int) -> int:
    """Tokens that one program takes, of which each has ``group_size`` rows."""
    padded_group: int = triton.next_power_of_2(group_size)
    return max(MIN_ROWS, padded_group) // padded_group


def attend(q_TNH: Tensor, kv_layer: Tensor, step: DeviceStep, scale: float) -> Tensor:
    """See `pdserve.kernels.base.AttentionPlan.attend`; ``q`` is contiguous."""
    _, num_heads, head_dim = q_TNH.shape
    _, _, num_kv_heads, block_size, _ = kv_layer.shape
    group_size = num_heads // num_kv_heads
    padded_group = triton.next_power_of_2(group_size)
    out_TNH = torch.empty_like(q_TNH)
    attend_kernel[(step.items.shape[0], num_kv_heads)](
        q_TNH,
        kv_layer,
        step.items,
        step.block_table,
        out_TNH,
        scale,
        step.block_table.shape[1],
        num_kv_heads,
        group_size,
        head_dim,
        block_size,
        kv_layer.stride(0),
        ITEM_FIELDS,
        padded_group,
        max(MIN_DOT, triton.next_power_of_2(head_dim)),
        max(MIN_ROWS, padded_group),
        TILE_TOKENS,
        num_warps=4,
        enable_fp_fusion=False,
        num_stages=2,
    )
    return out_TNH
