"""Rotation of queries and keys, and the write of keys and values to the KV cache: one launch a layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdserve.kernels.base import Rotation
from pdserve.kernels.gpu.arithmetic import round_to


@triton.jit
def rotate_and_store_kernel(
    q,
    k,
    v,
    cos,
    sin,
    slot_mapping,
    q_out,
    kv_layer,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    PADDED_KV_HEADS: tl.constexpr,
    PADDED_HALF: tl.constexpr,
):
    """One token. A slot below 0 is nobody's: nothing is written to the cache."""
    token = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = HEAD_DIM // 2
    dims = tl.arange(0, PADDED_HALF)[None, :]
    dim_mask = dims < HALF
    angle = token * HEAD_DIM + dims
    cos_low, cos_high = tl.load(cos + angle, mask=dim_mask), tl.load(cos + HALF + angle, mask=dim_mask)
    sin_low, sin_high = tl.load(sin + angle, mask=dim_mask), tl.load(sin + HALF + angle, mask=dim_mask)

    heads = tl.arange(0, PADDED_HEADS)[:, None]
    mask = (heads < NUM_HEADS) & dim_mask
    source = q + token * Q_STRIDE + heads * HEAD_DIM + dims
    low, high = tl.load(source, mask=mask).to(tl.float32), tl.load(source + HALF, mask=mask).to(tl.float32)
    target = q_out + token * NUM_HEADS * HEAD_DIM + heads * HEAD_DIM + dims
    tl.store(target, round_to(low * cos_low + high * sin_low, q_out.dtype.element_ty), mask=mask)
    tl.store(target + HALF, round_to(high * cos_high + low * sin_high, q_out.dtype.element_ty), mask=mask)

    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    heads = tl.arange(0, PADDED_KV_HEADS)[:, None]
    mask = (heads < NUM_KV_HEADS) & dim_mask
    source = k + token * K_STRIDE + heads * HEAD_DIM + dims
    low, high = tl.load(source, mask=mask).to(tl.float32), tl.load(source + HALF, mask=mask).to(tl.float32)
    place = (slot // BLOCK_SIZE) * BLOCK_STRIDE + (slot % BLOCK_SIZE) * HEAD_DIM
    target = kv_layer + place + heads * BLOCK_SIZE * HEAD_DIM + dims
    tl.store(target, round_to(low * cos_low + high * sin_low, kv_layer.dtype.element_ty), mask=mask)
    tl.store(target + HALF, round_to(high * cos_high + low * sin_high, kv_layer.dtype.element_ty), mask=mask)

    source = v + token * V_STRIDE + heads * HEAD_DIM + dims
    low, high = tl.load(source, mask=mask).to(tl.float32), tl.load(source + HALF, mask=mask).to(tl.float32)
    target += NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
    tl.store(target, round_to(low, kv_layer.dtype.element_ty), mask=mask)
    tl.store(target + HALF, round_to(high, kv_layer.dtype.element_ty), mask=mask)


def rotate_and_store(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, rotation: Rotation, slot_mapping: Tensor, kv_layer: Tensor
) -> Tensor:
    """See `pdserve.kernels.base.AttentionPlan.rotate_and_store`.

    Args:
        q_TNH: each token's heads side by side, as in ``k_TKH`` and ``v_TKH``.
        k_TKH: keys.
        v_TKH: values.
        rotation: of the tokens.
        slot_mapping: [T] int64.
        kv_layer: [B, 2, K, S, H], a layer's view of the pool.
    """
    num_tokens, num_heads, head_dim = q_TNH.shape
    _, _, num_kv_heads, block_size, _ = kv_layer.shape
    out_TNH = torch.empty(num_tokens, num_heads, head_dim, dtype=q_TNH.dtype, device=q_TNH.device)
    rotate_and_store_kernel[(num_tokens,)](
        q_TNH,
        k_TKH,
        v_TKH,
        rotation.cos_TH,
        rotation.sin_TH,
        slot_mapping,
        out_TNH,
        kv_layer,
        q_TNH.stride(0),
        k_TKH.stride(0),
        v_TKH.stride(0),
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        kv_layer.stride(0),
        triton.next_power_of_2(num_heads),
        triton.next_power_of_2(num_kv_heads),
        triton.next_power_of_2(head_dim // 2),
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out_TNH
