"""A whole model's layers as one kernel, for backends that have it.

A step of a small model spends as long on calling 200 kernels as on some of them. A backend that can run all layers in
one call takes their weights once and gives the same bits as its kernels one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from pdserve.kernels.base import AttentionMetadata, LinearWeight, Rotation


class LayerHook(Protocol):
    """Called around each layer's attention, for connectors that move KV layer by layer."""

    def before_layer(self, layer: int) -> None:
        """``layer``'s KV is about to be written and read."""
        ...

    def after_layer(self, layer: int) -> None:
        """``layer``'s KV of this step's tokens stands in the cache."""
        ...


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Norm weights are [D], those of ``q_norm`` and ``k_norm`` [H] or None.

    Attributes:
        qkv: q, k and v projections stacked, ``(N + 2 K) * H`` rows.
        gate_up: gate and up projections stacked, ``2 I`` rows.
    """

    input_norm: Tensor
    qkv: LinearWeight
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: LinearWeight
    post_attention_norm: Tensor
    gate_up: LinearWeight
    down: LinearWeight


@dataclass(frozen=True)
class DecoderShape:
    """Sizes N, K and H, and the epsilon of all norms."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float


class FusedDecoder(Protocol):
    """All layers of one model."""

    def forward(
        self,
        residual_TD: Tensor,
        metadata: AttentionMetadata,
        rotation: Rotation,
        kv_cache: Tensor,
        on_layer: LayerHook | None,
    ) -> Tensor:
        """Run all layers and the final norm.

        Args:
            residual_TD: the embedded tokens; overwritten.
            metadata: the step.
            rotation: of its tokens.
            kv_cache: [B, L, 2, K, S, H]; the step's KV is written to it.
            on_layer: called around each layer's attention, in the calling thread.

        Returns:
            [T, D] in the backend's dtype.
        """
        ...


@runtime_checkable
class FusingBackend(Protocol):
    """A `pdserve.kernels.base.KernelBackend` that also runs whole models."""

    def build_decoder(self, layers: tuple[LayerWeights, ...], final_norm: Tensor, shape: DecoderShape) -> FusedDecoder:
        """Put the layers of one model together; the weights are this backend's own."""
        ...
