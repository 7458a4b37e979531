"""The Llama family: one implementation driven by the config (Llama, SmolLM2, Mistral, Qwen2, Qwen3).

A layer, with x the residual stream::

    h = norm(x);  q, k, v = qkv(h);  q, k = qk_norm(q), qk_norm(k)   (Qwen3)
    q, k rotated;  k, v written to the KV cache;  a = attention(q, cache)
    x += output(a);  h = norm(x);  x += down(silu(gate(h)) * up(h))

Knows no requests and no sampling: packed tokens in, hidden states out. All arithmetic is the kernel backend's, so a
token's result doesn't depend on its neighbours in the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.rope import RotaryTable
from pdserve.kernels.base import AttentionMetadata, AttentionPlan, KernelBackend, LinearWeight, Rotation
from pdserve.kernels.decoder import DecoderShape, FusingBackend, LayerHook, LayerWeights
from pdserve.kernels.invariance import KernelShapes


@dataclass(frozen=True)
class ModelWeights:
    """All weights; ``embedding`` is [V, D]."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: LinearWeight


@dataclass(frozen=True)
class _Step:
    """What all layers share in one forward pass."""

    rotation: Rotation
    plan: AttentionPlan
    kv_cache: Tensor


class CausalLM:
    """A causal language model of the Llama family.

    Args:
        config: its shape.
        weights: its weights, prepared by ``backend``.
        backend: the kernels it computes with.
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, backend: KernelBackend) -> None:
        self.config = config
        self.backend = backend
        self._weights = weights
        self._rotary = RotaryTable(config.rope, config.head_dim, config.max_position_embeddings)
        self._decoder = None
        if isinstance(backend, FusingBackend):
            shape = DecoderShape(config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps)
            self._decoder = backend.build_decoder(weights.layers, weights.final_norm, shape)

    @torch.inference_mode()
    def forward(
        self,
        token_ids_T: Tensor,
        metadata: AttentionMetadata,
        kv_cache: Tensor,
        on_layer: LayerHook | None = None,
    ) -> Tensor:
        """Run one step.

        Args:
            token_ids_T: [T] int64.
            metadata: whose tokens they are and where their KV goes.
            kv_cache: [B, L, 2, K, S, H] in any dtype the backend takes; this step's KV is written to it.
            on_layer: called around each layer's attention.

        Returns:
            [T, D] hidden states behind the final norm, in the backend's dtype.
        """
        rotation = self._rotary.get_rotation(metadata.positions)
        residual_TD = self._weights.embedding[token_ids_T]
        if self._decoder is not None:
            return self._decoder.forward(residual_TD, metadata, rotation, kv_cache, on_layer)
        plan = self.backend.build_plan(metadata, kv_cache, self.config.num_heads, self.config.head_dim**-0.5)
        return self._forward_layers(residual_TD, _Step(rotation, plan, kv_cache), on_layer)

    @torch.inference_mode()
    def compute_logits(self, hidden_RD: Tensor, out_RV: Tensor | None = None) -> Tensor:
        """Logits [R, V] float32 of hidden states [R, D]; in ``out_RV`` if that is given."""
        return self.backend.linear_float32(hidden_RD, self._weights.lm_head, out_RV)

    def get_kernel_shapes(self) -> KernelShapes:
        """What `pdserve.kernels.invariance.check_invariance` checks: this model's own weights and shapes."""
        first = self._weights.layers[0]
        config = self.config
        return KernelShapes(
            linears=(first.qkv, first.output, first.gate_up, first.down, self._weights.lm_head),
            norm=first.input_norm,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate_size=config.intermediate_size,
        )

    def _forward_layers(self, residual_TD: Tensor, step: _Step, on_layer: LayerHook | None) -> Tensor:
        """All layers, kernel by kernel; ``residual`` is overwritten."""
        layers = self._weights.layers
        hidden_TD = self.backend.rms_norm(residual_TD, layers[0].input_norm, self.config.rms_norm_eps)
        next_norms = (*(layer.input_norm for layer in layers[1:]), self._weights.final_norm)
        for index, (layer, next_norm) in enumerate(zip(layers, next_norms, strict=True)):
            attended_TD = self._attend(index, layer, hidden_TD, step, on_layer)
            hidden_TD = self._add_norm(attended_TD, residual_TD, layer.post_attention_norm)
            gate_up_T2I = self.backend.linear(hidden_TD, layer.gate_up)
            fed_TD = self.backend.linear(self.backend.silu_mul(gate_up_T2I), layer.down)
            hidden_TD = self._add_norm(fed_TD, residual_TD, next_norm)
        return hidden_TD

    def _attend(
        self, index: int, layer: LayerWeights, hidden_TD: Tensor, step: _Step, on_layer: LayerHook | None
    ) -> Tensor:
        q_TNH, k_TKH, v_TKH = self._project(layer, hidden_TD)
        kv_layer = step.kv_cache[:, index]
        if on_layer is not None:
            on_layer.before_layer(index)
        q_TNH = step.plan.rotate_and_store(q_TNH, k_TKH, v_TKH, step.rotation, kv_layer)
        attended_TNH = step.plan.attend(q_TNH, kv_layer)
        if on_layer is not None:
            on_layer.after_layer(index)
        return self.backend.linear(attended_TNH.flatten(1), layer.output)

    def _project(self, layer: LayerWeights, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, N, H], keys and values [T, K, H], the first two normed where the model does so."""
        config = self.config
        qkv = self.backend.linear(hidden_TD, layer.qkv).view(hidden_TD.shape[0], -1, config.head_dim)
        sizes = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
        q_TNH, k_TKH, v_TKH = torch.split(qkv, sizes, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q_TNH = self.backend.rms_norm(q_TNH, layer.q_norm, config.rms_norm_eps)
            k_TKH = self.backend.rms_norm(k_TKH, layer.k_norm, config.rms_norm_eps)
        return q_TNH, k_TKH, v_TKH

    def _add_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor) -> Tensor:
        return self.backend.add_rms_norm(x_TD, residual_TD, weight_D, self.config.rms_norm_eps)
