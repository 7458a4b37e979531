"""What a decoder's call refuses before it reads or writes anything."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pdserve.kernels.base import AttentionMetadata, Rotation
from pdserve.kernels.cpp_backend import CppBackend
from pdserve.kernels.decoder import DecoderShape, FusedDecoder, LayerWeights

BF16 = torch.bfloat16
SHAPE = DecoderShape(num_heads=2, num_kv_heads=1, head_dim=16, rms_norm_eps=1e-5)
HIDDEN, INNER, BLOCK_SIZE = 32, 48, 16


def build_decoder() -> FusedDecoder:
    backend = CppBackend(num_threads=1)
    generator = torch.Generator().manual_seed(0)

    def make(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(BF16)

    layer = LayerWeights(
        input_norm=make(HIDDEN),
        qkv=backend.prepare_linear(make(64, HIDDEN), None),
        q_norm=None,
        k_norm=None,
        output=backend.prepare_linear(make(HIDDEN, 32), None),
        post_attention_norm=make(HIDDEN),
        gate_up=backend.prepare_linear(make(2 * INNER, HIDDEN), None),
        down=backend.prepare_linear(make(HIDDEN, INNER), None),
    )
    return backend.build_decoder((layer,), make(HIDDEN), SHAPE)


@pytest.mark.parametrize(
    ("num_tokens", "seq_len", "block_ids"),
    [(1, 20, [0, 3]), (1, 20, [0, -1]), (1, 33, [0, 1]), (3, 2, [0, 1])],
    ids=["a block behind the pool", "a block before it", "a context longer than its table", "more tokens than context"],
)
def test_a_step_outside_the_pool_touches_nothing(num_tokens: int, seq_len: int, block_ids: list[int]) -> None:
    kv_cache = torch.zeros(3, 1, 2, 1, BLOCK_SIZE, 16, dtype=BF16)
    arrays = (np.array(values, dtype=np.int64) for values in ([0, num_tokens], [seq_len], [block_ids]))
    metadata = AttentionMetadata(BLOCK_SIZE, *arrays)
    rotation = Rotation(*(torch.ones(num_tokens, 16) for _ in range(2)))
    with pytest.raises(IndexError, match="outside the KV memory"):
        build_decoder().forward(torch.ones(num_tokens, HIDDEN, dtype=BF16), metadata, rotation, kv_cache, None)
    assert not kv_cache.any()
