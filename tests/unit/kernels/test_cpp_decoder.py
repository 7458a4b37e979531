"""All layers in one call against the same kernels one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.kernels.base import AttentionMetadata, Rotation
from pdserve.kernels.cpp_backend import CppBackend
from pdserve.kernels.decoder import DecoderShape, LayerWeights
from pdserve.kernels.layer_loop import LayerLoop
from pdserve.kernels.native_library import get_supported_variants

BF16 = torch.bfloat16
NUM_LAYERS, HIDDEN, INNER = 3, 96, 160
EPS = 1e-5


class Model:
    """Random weights of a small model, and its layers computed kernel by kernel."""

    def __init__(
        self, backend: CppBackend, shape: DecoderShape, *, has_bias: bool, qk_norm: bool, inner: int = INNER
    ) -> None:
        self.backend, self.shape = backend, shape
        generator = torch.Generator().manual_seed(0)

        def tensor(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(BF16)

        def linear(out_features: int, in_features: int) -> Any:
            bias = tensor(out_features) if has_bias else None
            return backend.prepare_linear(tensor(out_features, in_features) * in_features**-0.5, bias)

        heads, kv_heads, dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.layers = tuple(
            LayerWeights(
                input_norm=tensor(HIDDEN),
                qkv=linear((heads + 2 * kv_heads) * dim, HIDDEN),
                q_norm=tensor(dim) if qk_norm else None,
                k_norm=tensor(dim) if qk_norm else None,
                output=linear(HIDDEN, heads * dim),
                post_attention_norm=tensor(HIDDEN),
                gate_up=linear(2 * inner, HIDDEN),
                down=linear(HIDDEN, inner),
            )
            for _ in range(NUM_LAYERS)
        )
        self.final_norm = tensor(HIDDEN)

    def forward_one_by_one(
        self, residual: Tensor, metadata: AttentionMetadata, rotation: Rotation, kv_cache: Tensor
    ) -> Tensor:
        loop = LayerLoop(self.backend, self.layers, self.final_norm, self.shape)
        return loop.forward(residual, metadata, rotation, kv_cache, None)


class Calls:
    def __init__(self, kv_cache: Tensor, block: int) -> None:
        self.kv_cache, self.block = kv_cache, block
        self.names: list[tuple[str, int]] = []

    def before_layer(self, layer: int) -> None:
        assert self.kv_cache[self.block, layer].isnan().all()
        self.names.append(("before", layer))

    def after_layer(self, layer: int) -> None:
        assert self.kv_cache[self.block, layer].isfinite().all()
        self.names.append(("after", layer))


class Refusal:
    def before_layer(self, layer: int) -> None:
        if layer == 1:
            raise ValueError("the load of layer 1 failed")

    def after_layer(self, layer: int) -> None:
        assert layer == 0


def build_step(shape: DecoderShape, kv_dtype: torch.dtype) -> tuple[Tensor, AttentionMetadata, Rotation, Tensor]:
    """A prompt's chunk of 35 tokens that fills three blocks' rest, a decode row and a prompt of 2."""
    generator = torch.Generator().manual_seed(1)
    metadata = AttentionMetadata.build([35, 1, 2], [48, 20, 2], [[7, 2, 5], [0, 4], [6]], 16)
    angles = torch.rand(38, shape.head_dim // 2, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    rotation = Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    kv_cache = torch.randn(8, NUM_LAYERS, 2, shape.num_kv_heads, 16, shape.head_dim, generator=generator).to(kv_dtype)
    return torch.randn(38, HIDDEN, generator=generator).to(BF16), metadata, rotation, kv_cache


@pytest.mark.parametrize("variant", [variant.name for variant in get_supported_variants()])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("has_bias", "qk_norm"), [(False, False), (True, False), (False, True)])
def test_layers_in_one_call_equal_kernels_one_by_one(
    variant: str, kv_dtype: torch.dtype, has_bias: bool, qk_norm: bool
) -> None:
    shape = DecoderShape(num_heads=6, num_kv_heads=2, head_dim=24, rms_norm_eps=EPS)
    model = Model(CppBackend(variant), shape, has_bias=has_bias, qk_norm=qk_norm)
    residual, metadata, rotation, kv_cache = build_step(shape, kv_dtype)
    other_residual, other_cache = residual.clone(), kv_cache.clone()
    expected = model.forward_one_by_one(other_residual, metadata, rotation, other_cache)
    decoder = model.backend.build_decoder(model.layers, model.final_norm, shape)
    actual = decoder.forward(residual, metadata, rotation, kv_cache, None)
    assert expected.isfinite().all()
    assert torch.equal(actual, expected)
    assert torch.equal(kv_cache, other_cache)


@pytest.mark.parametrize("quantization", ["int8", "w8a8"])
def test_layers_in_one_call_equal_kernels_one_by_one_with_quantised_weights(quantization: str) -> None:
    shape = DecoderShape(num_heads=6, num_kv_heads=2, head_dim=24, rms_norm_eps=EPS)
    model = Model(CppBackend(quantization=quantization), shape, has_bias=True, qk_norm=True)
    residual, metadata, rotation, kv_cache = build_step(shape, BF16)
    expected = model.forward_one_by_one(residual.clone(), metadata, rotation, kv_cache.clone())
    decoder = model.backend.build_decoder(model.layers, model.final_norm, shape)
    assert torch.equal(decoder.forward(residual, metadata, rotation, kv_cache, None), expected)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("quantization", ["none", "int8", "w8a8"])
@pytest.mark.parametrize("inner", [INNER, 168], ids=["whole panels", "a panel of both halves"])
def test_blocks_of_rows_equal_kernels_one_by_one(inner: int, quantization: str, num_threads: int) -> None:
    shape = DecoderShape(num_heads=4, num_kv_heads=2, head_dim=32, rms_norm_eps=EPS)
    backend = CppBackend(num_threads=num_threads, quantization=quantization)
    model = Model(backend, shape, has_bias=True, qk_norm=True, inner=inner)
    generator = torch.Generator().manual_seed(2)
    query_lens, seq_lens = [270, 1, 30], [300, 40, 30]
    metadata = AttentionMetadata.build(query_lens, seq_lens, [list(range(19)), [19, 20, 21], [22, 23]], 16)
    angles = torch.rand(sum(query_lens), 16, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    rotation = Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    kv_cache = torch.randn(24, NUM_LAYERS, 2, 2, 16, 32, generator=generator).to(BF16)
    residual = torch.randn(sum(query_lens), HIDDEN, generator=generator).to(BF16)
    other_cache = kv_cache.clone()
    expected = model.forward_one_by_one(residual.clone(), metadata, rotation, other_cache)
    decoder = backend.build_decoder(model.layers, model.final_norm, shape)
    assert torch.equal(decoder.forward(residual, metadata, rotation, kv_cache, None), expected)
    assert torch.equal(kv_cache, other_cache)


def test_hooks_are_called_around_each_layers_attention() -> None:
    shape = DecoderShape(num_heads=4, num_kv_heads=4, head_dim=32, rms_norm_eps=EPS)
    model = Model(CppBackend(), shape, has_bias=False, qk_norm=False)
    decoder = model.backend.build_decoder(model.layers, model.final_norm, shape)
    residual, metadata, rotation, kv_cache = build_step(shape, BF16)
    expected = decoder.forward(residual.clone(), metadata, rotation, kv_cache.clone(), None)
    kv_cache[2] = torch.nan
    calls = Calls(kv_cache, 2)
    assert torch.equal(decoder.forward(residual, metadata, rotation, kv_cache, calls), expected)
    assert calls.names == [(name, layer) for layer in range(NUM_LAYERS) for name in ("before", "after")]


def test_what_a_hook_raises_ends_the_step() -> None:
    shape = DecoderShape(num_heads=4, num_kv_heads=4, head_dim=32, rms_norm_eps=EPS)
    model = Model(CppBackend(), shape, has_bias=False, qk_norm=False)
    decoder = model.backend.build_decoder(model.layers, model.final_norm, shape)
    with pytest.raises(ValueError, match="layer 1 failed"):
        decoder.forward(*build_step(shape, BF16), Refusal())
