"""A model's layers computed kernel by kernel, for any backend.

A layer, with x the residual stream::

    h = norm(x);  q, k, v = qkv(h);  q, k = qk_norm(q), qk_norm(k)   (Qwen3)
    q, k rotated;  k, v written to the KV cache;  a = attention(q, cache)
    x += output(a);  h = norm(x);  x += down(silu(gate(h)) * up(h))

Where ranks share the layers, each has the weights of some heads and some outputs of each product, and `Gather` puts
their columns together: a sum is never split, so its bits are those of one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pdserve.kernels.base import AttentionMetadata, AttentionPlan, KernelBackend, LinearWeight, Rotation
from pdserve.kernels.decoder import DecoderShape, LayerHook, LayerWeights

Gather = Callable[[Tensor], Tensor]
"""From this rank's columns [T, C] to all ranks' side by side, in the order of the ranks."""


def keep(x: Tensor) -> Tensor:
    """The `Gather` of a single rank, which has all columns."""
    return x


class LayerLoop:
    """See `pdserve.kernels.decoder.FusedDecoder`.

    Args:
        backend: the kernels; it prepared the weights.
        layers: the weights, or this rank's share of their outputs.
        final_norm: [D].
        shape: of the attention that is computed here.
        gather: puts the ranks' columns together.
    """

    def __init__(
        self,
        backend: KernelBackend,
        layers: Sequence[LayerWeights],
        final_norm: Tensor,
        shape: DecoderShape,
        gather: Gather = keep,
    ) -> None:
        self._gather = gather
        self._backend = backend
        self._layers = tuple(layers)
        self._next_norms = (*(layer.input_norm for layer in layers[1:]), final_norm)
        self._shape = shape

    def forward(
        self,
        residual_TD: Tensor,
        metadata: AttentionMetadata,
        rotation: Rotation,
        kv_cache: Tensor,
        on_layer: LayerHook | None,
    ) -> Tensor:
        """See `pdserve.kernels.decoder.FusedDecoder.forward`."""
        return self.run(residual_TD, self.build_plan(metadata, kv_cache), rotation, kv_cache, on_layer)

    @property
    def scale(self) -> float:
        """What attention's scores are multiplied by."""
        return float(self._shape.head_dim**-0.5)

    def build_plan(self, metadata: AttentionMetadata, kv_cache: Tensor) -> AttentionPlan:
        """The step's plan, as `run` takes it."""
        return self._backend.build_plan(metadata, kv_cache, self._shape.num_heads, self.scale)

    def run(
        self,
        residual_TD: Tensor,
        plan: AttentionPlan,
        rotation: Rotation,
        kv_cache: Tensor,
        on_layer: LayerHook | None = None,
    ) -> Tensor:
        """`forward` of a step whose plan is made already."""
        hidden_TD = self._backend.rms_norm(residual_TD, self._layers[0].input_norm, self._shape.rms_norm_eps)
        for index, (layer, next_norm) in enumerate(zip(self._layers, self._next_norms, strict=True)):
            q_TNH, k_TKH, v_TKH = self._project(layer, hidden_TD)
            kv_layer = kv_cache[:, index]
            if on_layer is not None:
                on_layer.before_layer(index)
            q_TNH = plan.rotate_and_store(q_TNH, k_TKH, v_TKH, rotation, kv_layer)
            attended_TNH = plan.attend(q_TNH, kv_layer)
            if on_layer is not None:
                on_layer.after_layer(index)
            attended_TD = self._multiply(attended_TNH.flatten(1), layer.output)
            hidden_TD = self._add_norm(attended_TD, residual_TD, layer.post_attention_norm)
            gate_up_T2I = self._backend.linear(hidden_TD, layer.gate_up)
            fed_TD = self._multiply(self._backend.silu_mul(gate_up_T2I), layer.down)
            hidden_TD = self._add_norm(fed_TD, residual_TD, next_norm)
        return hidden_TD

    def _project(self, layer: LayerWeights, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, N, H], keys and values [T, K, H], the first two normed where the model does so."""
        shape = self._shape
        qkv = self._backend.linear(hidden_TD, layer.qkv).view(hidden_TD.shape[0], -1, shape.head_dim)
        sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        q_TNH, k_TKH, v_TKH = torch.split(qkv, sizes, dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q_TNH = self._backend.rms_norm(q_TNH, layer.q_norm, shape.rms_norm_eps)
            k_TKH = self._backend.rms_norm(k_TKH, layer.k_norm, shape.rms_norm_eps)
        return q_TNH, k_TKH, v_TKH

    def _multiply(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """``weight``'s outputs [T, D] of inputs whose columns the ranks share, as they share its outputs."""
        return self._gather(self._backend.linear(self._gather(x), weight))

    def _add_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor) -> Tensor:
        return self._backend.add_rms_norm(x_TD, residual_TD, weight_D, self._shape.rms_norm_eps)
