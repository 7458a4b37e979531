"""The Llama family: one implementation driven by the config (Llama, SmolLM2, Mistral, Qwen2, Qwen3).

Knows no requests and no sampling: packed tokens in, hidden states out. All arithmetic is the kernel backend's, so a
token's result doesn't depend on its neighbours in the step; `pdserve.kernels.layer_loop` spells out a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.rope import build_rotation_table
from pdserve.kernels.base import AttentionMetadata, KernelBackend, LinearWeight, Tables
from pdserve.kernels.decoder import DecoderShape, FusedDecoder, FusingBackend, LayerHook, LayerWeights
from pdserve.kernels.invariance import KernelShapes
from pdserve.kernels.layer_loop import LayerLoop


@dataclass(frozen=True)
class ModelWeights:
    """All weights; ``embedding`` as `pdserve.kernels.base.KernelBackend.prepare_embedding` made it."""

    embedding: LinearWeight
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: LinearWeight


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
        rotation = build_rotation_table(config.rope, config.head_dim, config.max_position_embeddings, backend.device)
        self._tables = Tables(weights.embedding, rotation)
        shape = DecoderShape(config.num_heads, config.num_kv_heads, config.head_dim, config.rms_norm_eps)
        self._decoder: FusedDecoder = (
            backend.build_decoder(weights.layers, weights.final_norm, shape)
            if isinstance(backend, FusingBackend)
            else LayerLoop(backend, weights.layers, weights.final_norm, shape)
        )

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
        residual_TD, rotation = self.backend.look_up(self._tables, token_ids_T, metadata.positions)
        return self._decoder.forward(residual_TD, metadata, rotation, kv_cache, on_layer)

    def compute_logits(self, hidden_RD: Tensor, out_RV: Tensor | None = None) -> Tensor:
        """Logits [R, V] float32 of hidden states [R, D]; in ``out_RV`` if that is given."""
        return self.backend.linear_float32(hidden_RD, self._weights.lm_head, out_RV)

    def find_likeliest(self, hidden_RD: Tensor) -> tuple[Tensor, Tensor]:
        """The largest logit of each of the hidden states [R, D], the lowest token id among equals.

        Returns:
            Token ids [R] int64 and their logits [R] float32; a logit that is not finite means that some are not.
        """
        return self.backend.linear_argmax(hidden_RD, self._weights.lm_head)

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
