"""One step's attention, kernel by kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.kernels import cpp_kernels
from pdserve.kernels.base import AttentionMetadata, Rotation
from pdserve.kernels.cpp_step import CppStep


class CppAttention:
    """See `pdserve.kernels.base.AttentionPlan`.

    Args:
        metadata: the step.
        scale: what scores are multiplied by.
        variant: instruction set.
        num_threads: compute threads.
    """

    def __init__(self, metadata: AttentionMetadata, scale: float, variant: str, num_threads: int) -> None:
        step = CppStep.of(metadata)
        self._block_size = metadata.block_size
        self._step = [step.query_start_loc, step.seq_lens, step.block_table, step.slot_mapping]
        self._scale = scale
        self._variant = variant
        self._num_threads = num_threads

    def rotate_and_store(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, rotation: Rotation, kv_layer: Tensor
    ) -> Tensor:
        """See `pdserve.kernels.base.AttentionPlan.rotate_and_store`."""
        assert kv_layer.shape[3] == self._block_size
        return cpp_kernels.rotate_and_store(
            _require_heads(q_TNH),
            _require_heads(k_TKH),
            _require_heads(v_TKH),
            [rotation.cos_TH, rotation.sin_TH],
            kv_layer,
            self._step,
            self._variant,
            self._num_threads,
        )

    def attend(self, q_TNH: Tensor, kv_layer: Tensor) -> Tensor:
        """See `pdserve.kernels.base.AttentionPlan.attend`."""
        assert kv_layer.shape[3] == self._block_size
        return cpp_kernels.attend(
            q_TNH.contiguous(), kv_layer, self._step, self._scale, self._variant, self._num_threads
        )


def _require_heads(x_TNH: Tensor) -> Tensor:
    """``x`` with each token's heads side by side."""
    assert x_TNH.dtype == torch.bfloat16
    adjacent = x_TNH.stride(2) == 1 and x_TNH.stride(1) == x_TNH.shape[2]
    return x_TNH if adjacent else x_TNH.contiguous()
