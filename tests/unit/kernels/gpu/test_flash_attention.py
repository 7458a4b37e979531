"""What flash-attn is called with, by a stand-in that attends in float64 to exactly what the arguments say."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.errors import ConfigError
from pdserve.kernels.base import AttentionMetadata, Rotation
from pdserve.kernels.gpu.flash_attention import FlashAttention, FlashPlan

BF16 = torch.bfloat16
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 16, 256
SCALE = 0.25


class Library:
    """``flash_attn_with_kvcache`` as its documentation has it: shapes, dtypes and a mask aligned to the end."""

    def __init__(self) -> None:
        self.query_shapes: list[tuple[int, ...]] = []

    def __call__(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any) -> Tensor:
        assert (options["causal"], options["num_splits"]) == (True, 1)
        seq_lens, table = options["cache_seqlens"], options["block_table"]
        assert seq_lens.dtype == table.dtype == torch.int32
        assert q.dtype == k_cache.dtype == v_cache.dtype == BF16
        assert k_cache.stride(-1) == v_cache.stride(-1) == q.stride(-1) == table.stride(-1) == 1
        assert k_cache.shape[1:] == (BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
        assert len(seq_lens) == len(table) == len(q)
        self.query_shapes.append(tuple(q.shape))
        return torch.stack(
            [
                self._attend(
                    query.double(),
                    *(cache[blocks.long()].flatten(0, 1)[:length].double() for cache in (k_cache, v_cache)),
                    options["softmax_scale"],
                )
                for query, blocks, length in zip(q, table, seq_lens.tolist(), strict=True)
            ]
        ).to(BF16)

    @staticmethod
    def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1 + len(k) - len(q))
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


class Writer:
    """Stands for Triton's half of the plan."""

    def rotate_and_store(self, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, kv_layer: Tensor) -> Tensor:
        return q + k.sum() + v.sum() + rotation.cos_TH.sum() + kv_layer.sum()

    def attend(self, q: Tensor, kv_layer: Tensor) -> Tensor:
        raise AssertionError("flash-attn attends")


def build_plan(library: Library, metadata: AttentionMetadata, kv_cache: Tensor) -> FlashPlan:
    return FlashPlan(FlashAttention(library, "2.8.3"), Writer(), metadata, kv_cache, SCALE)


def build_pool(dtype: torch.dtype = BF16, block_size: int = BLOCK_SIZE, head_dim: int = HEAD_DIM) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(5, 2, 2, NUM_KV_HEADS, block_size, head_dim, generator=generator).to(dtype)


def test_a_mixed_step_is_one_call_for_each_number_of_tokens() -> None:
    library, kv_cache = Library(), build_pool()
    query_lens, seq_lens, blocks = [1, 3, 1, 3], [300, 260, 7, 3], [[4, 1], [3, 0], [2], [1]]
    metadata = AttentionMetadata.build(query_lens, seq_lens, blocks, BLOCK_SIZE)
    q = torch.randn(8, NUM_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(1)).to(BF16)
    result = build_plan(library, metadata, kv_cache).attend(q, kv_cache[:, 1])
    assert library.query_shapes == [(2, 1, NUM_HEADS, HEAD_DIM), (2, 3, NUM_HEADS, HEAD_DIM)]
    start = 0
    for count, length, ids in zip(query_lens, seq_lens, blocks, strict=True):
        keys, values = (kv_cache[ids, 1, i].transpose(1, 2).flatten(0, 1)[:length].double() for i in (0, 1))
        expected = Library._attend(q[start : start + count].double(), keys, values, SCALE).to(BF16)
        assert torch.equal(result[start : start + count], expected)
        start += count


def test_the_cache_is_seen_not_copied() -> None:
    seen: list[Tensor] = []

    def remember(q: Tensor, k_cache: Tensor, v_cache: Tensor, **_: Any) -> Tensor:
        seen.extend((k_cache, v_cache))
        return q

    kv_cache = build_pool()
    metadata = AttentionMetadata.build([1], [7], [[2]], BLOCK_SIZE)
    plan = FlashPlan(FlashAttention(remember, "2.8.3"), Writer(), metadata, kv_cache, SCALE)
    plan.attend(torch.zeros(1, NUM_HEADS, HEAD_DIM, dtype=BF16), kv_cache[:, 1])
    assert [x.data_ptr() for x in seen] == [kv_cache[0, 1, 0].data_ptr(), kv_cache[0, 1, 1].data_ptr()]


def test_the_rest_is_tritons() -> None:
    kv_cache = build_pool()
    metadata = AttentionMetadata.build([1], [1], [[0]], BLOCK_SIZE)
    ones = torch.ones(1, 1, 1)
    rotation = Rotation(torch.ones(1, 1), torch.ones(1, 1))
    plan = build_plan(Library(), metadata, kv_cache)
    assert float(plan.rotate_and_store(ones, ones, ones, rotation, torch.ones(2))) == 6


@pytest.mark.parametrize(
    ("pool", "reason"),
    [
        (build_pool(torch.float32), "KV in bfloat16, not torch.float32"),
        (build_pool(block_size=16), "block_size is 16: set it to 256"),
        (build_pool(head_dim=20), "multiples of 8 up to 256; this model's is 20"),
        (build_pool(head_dim=264), "this model's is 264"),
    ],
)
def test_what_the_library_does_not_take_is_refused(pool: Tensor, reason: str) -> None:
    metadata = AttentionMetadata.build([1], [1], [[0]], pool.shape[4])
    with pytest.raises(ConfigError, match=reason):
        build_plan(Library(), metadata, pool)
