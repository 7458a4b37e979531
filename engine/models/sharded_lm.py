"""One rank's share of a model of the Llama family, computed together with the other ranks.

The ranks of a pipeline stage share each product's outputs and put them together (`pdserve.kernels.layer_loop`); norms,
the residual stream and the embedding are whole in each of them. From stage to stage goes the residual stream, from each
rank to the one with the same share; the ranks of the last stage all have the logits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdserve.engine.models.rope import build_rotation_table
from pdserve.engine.models.shard import Shard
from pdserve.kernels.base import AttentionMetadata, KernelBackend, LinearWeight, Rotation, Tables
from pdserve.kernels.decoder import DecoderShape, FusedDecoder, FusingBackend, LayerHook, LayerWeights
from pdserve.kernels.invariance import KernelShapes
from pdserve.kernels.layer_loop import LayerLoop
from pdserve.kernels.row_maxima import find_row_maxima
from pdserve.kv_layout import Rank


class RankGroup(Protocol):
    """A rank among the others. All of them make the same calls in the same order."""

    @property
    def rank(self) -> Rank:
        """Which one it is."""
        ...

    def gather(self, columns: Tensor) -> Tensor:
        """From this rank's columns [T, C] to those of all ranks of its stage, side by side in their order."""
        ...

    def send_to_next_stage(self, x: Tensor) -> None:
        """Hand ``x`` to the rank of the next stage that has the same share."""
        ...

    def receive_from_previous_stage(self, into: Tensor) -> None:
        """Fill ``into`` with what the rank of the stage before sends."""
        ...


@dataclass(frozen=True)
class ShardWeights:
    """A rank's weights; see `pdserve.engine.models.llama.ModelWeights`. What another stage has is None."""

    embedding: LinearWeight | None
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor | None
    lm_head: LinearWeight | None


class ShardedLM:
    """`pdserve.engine.models.llama.CausalLM`, as one of several ranks.

    Args:
        shard: which part of the model.
        weights: that part's, prepared by ``backend``.
        backend: the kernels it computes with.
        group: the other ranks.
    """

    def __init__(self, shard: Shard, weights: ShardWeights, backend: KernelBackend, group: RankGroup) -> None:
        self.config = config = shard.config
        self.backend = backend
        self._shard = shard
        self._weights = weights
        self._group = group
        self._rotation = build_rotation_table(
            config.rope, config.head_dim, config.max_position_embeddings, backend.device
        )
        self._decoder = self._build_decoder()

    def forward(
        self,
        token_ids_T: Tensor,
        metadata: AttentionMetadata,
        kv_cache: Tensor,
        on_layer: LayerHook | None = None,
    ) -> Tensor | None:
        """Run one step's layers of this stage; the arguments are those of `CausalLM.forward`.

        Returns:
            [T, D] hidden states behind the final norm; None where they go on to the next stage.
        """
        residual_TD, rotation = self._begin(token_ids_T, metadata)
        hidden_TD = self._decoder.forward(residual_TD, metadata, rotation, kv_cache, on_layer)
        if self._shard.is_last_stage:
            return hidden_TD
        self._group.send_to_next_stage(residual_TD)
        return None

    def compute_logits(self, hidden_RD: Tensor, out_RV: Tensor | None = None) -> Tensor:
        """See `CausalLM.compute_logits`; for ranks of the last stage, all of which call it."""
        logits_RV = self._group.gather(self.backend.linear_float32(hidden_RD, self._lm_head))
        return logits_RV if out_RV is None else out_RV.copy_(logits_RV)

    def find_likeliest(self, hidden_RD: Tensor) -> tuple[Tensor, Tensor]:
        """See `CausalLM.find_likeliest`; for ranks of the last stage, all of which call it."""
        lm_head = self._lm_head
        token_ids_R, logits_R = self.backend.linear_argmax(hidden_RD, lm_head)
        token_ids_R = token_ids_R + self._shard.rank.tensor_parallel_rank * lm_head.out_features
        # Both are exact in float64. Ranks have ascending token ids, so the first of equal ones has the lowest.
        pairs_R2 = torch.stack((token_ids_R.double(), logits_R.double()), dim=1)
        token_ids_RP, logits_RP = self._group.gather(pairs_R2).view(len(hidden_RD), -1, 2).unbind(2)
        best_R, best_logits_R = find_row_maxima(logits_RP)
        return token_ids_RP.gather(1, best_R[:, None])[:, 0].long(), best_logits_R.float()

    def get_kernel_shapes(self) -> KernelShapes:
        """What `pdserve.kernels.invariance.check_invariance` checks: this rank's own weights and shapes."""
        first, lm_head = self._weights.layers[0], self._weights.lm_head
        return KernelShapes(
            linears=(first.qkv, first.output, first.gate_up, first.down, *(() if lm_head is None else (lm_head,))),
            norm=first.input_norm,
            num_heads=self._shard.num_heads,
            num_kv_heads=self._shard.num_kv_heads,
            head_dim=self.config.head_dim,
            intermediate_size=first.gate_up.out_features // 2,
        )

    @property
    def _lm_head(self) -> LinearWeight:
        assert self._weights.lm_head is not None, "only the last stage has logits"
        return self._weights.lm_head

    def _build_decoder(self) -> FusedDecoder:
        layers, final_norm = self._weights.layers, self._weights.final_norm
        if final_norm is None:
            # What the last layer norms for a layer behind it is of no use here: that one norms what it receives.
            final_norm = layers[-1].input_norm
        shard = self._shard
        shape = DecoderShape(shard.num_heads, shard.num_kv_heads, self.config.head_dim, self.config.rms_norm_eps)
        if shard.rank.tensor_parallel_size == 1 and isinstance(self.backend, FusingBackend):
            return self.backend.build_decoder(layers, final_norm, shape)
        return LayerLoop(self.backend, layers, final_norm, shape, self._group.gather)

    def _begin(self, token_ids_T: Tensor, metadata: AttentionMetadata) -> tuple[Tensor, Rotation]:
        """The residual stream that this stage begins with, and the rotation of the step's tokens."""
        if self._weights.embedding is not None:
            tables = Tables(self._weights.embedding, self._rotation)
            return self.backend.look_up(tables, token_ids_T, metadata.positions)
        shape = (len(token_ids_T), self.config.hidden_size)
        residual_TD = torch.empty(shape, dtype=self.backend.dtype, device=self.backend.device)
        self._group.receive_from_previous_stage(residual_TD)
        return residual_TD, self._rotation.select(metadata.positions)
