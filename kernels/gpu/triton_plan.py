"""One step's attention in Triton."""

from __future__ import annotations

from torch import Tensor

from pdserve.kernels.base import Rotation
from pdserve.kernels.gpu.attention import attend
from pdserve.kernels.gpu.rotary import rotate_and_store
from pdserve.kernels.gpu.step import DeviceStep


class TritonPlan:
    """See `pdserve.kernels.base.AttentionPlan`.

    Args:
        step: the step, on the device; read at each launch.
        scale: what scores are multiplied by.
    """

    def __init__(self, step: DeviceStep, scale: float) -> None:
        self._step = step
        self._scale = scale

    def rotate_and_store(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, rotation: Rotation, kv_layer: Tensor
    ) -> Tensor:
        """See `pdserve.kernels.base.AttentionPlan.rotate_and_store`."""
        return rotate_and_store(q_TNH, k_TKH, v_TKH, rotation, self._step.slot_mapping, kv_layer)

    def attend(self, q_TNH: Tensor, kv_layer: Tensor) -> Tensor:
        """See `pdserve.kernels.base.AttentionPlan.attend`."""
        return attend(q_TNH.contiguous(), kv_layer, self._step, self._scale)
