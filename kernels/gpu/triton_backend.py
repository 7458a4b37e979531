"""The Triton backend: every kernel of a forward pass on a GPU, or on CPU tensors in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from pdserve.kernels.base import AttentionMetadata, AttentionPlan, LinearWeight, Rotation, Tables
from pdserve.kernels.decoder import DecoderShape, FusedDecoder, LayerWeights
from pdserve.kernels.gpu import elementwise
from pdserve.kernels.gpu.attention import count_item_tokens
from pdserve.kernels.gpu.flash_attention import FlashAttention, FlashPlan
from pdserve.kernels.gpu.graph_decoder import Capture, GraphDecoder
from pdserve.kernels.gpu.linear import multiply
from pdserve.kernels.gpu.step import DeviceStep
from pdserve.kernels.gpu.triton_plan import TritonPlan
from pdserve.kernels.layer_loop import LayerLoop
from pdserve.kernels.row_maxima import find_row_maxima

NUMERICS_VERSION = 1
"""Raised when the order or rounding of any sum changes."""
ALIGNMENT_BYTES = 16
"""Triton compiles a kernel anew for addresses that are not multiples of this."""


class TritonBackend:
    """`pdserve.kernels.base.KernelBackend` in Triton.

    Args:
        dtype: of weights and activations, bfloat16 or float32.
        device: where tensors live; a CPU's only where Triton interprets.
        flash_attention: computes attention instead, in bfloat16.
        capture: makes graphs of decode steps; None = each kernel is launched by itself.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        flash_attention: FlashAttention | None = None,
        capture: Capture | None = None,
    ) -> None:
        assert flash_attention is None or (dtype == torch.bfloat16 and capture is None)
        self._dtype = dtype
        self._device = device
        self._flash_attention = flash_attention
        self._capture = capture

    @property
    def name(self) -> str:
        """See `KernelBackend`."""
        return "triton" if self._flash_attention is None else "flash-attn"

    @property
    def dtype(self) -> torch.dtype:
        """See `KernelBackend`."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """See `KernelBackend`."""
        return self._device

    @property
    def numerics(self) -> str:
        """See `KernelBackend`: Triton brings its own assembler, so its version and the target decide the code."""
        dtype = str(self._dtype).removeprefix("torch.")
        target = describe_target(self._device)
        flash = "" if self._flash_attention is None else f"/flash-attn-{self._flash_attention.version}-batch-dependent"
        return f"triton/{NUMERICS_VERSION}/{triton.__version__}/{target}/{dtype}{flash}"

    def prepare_linear(self, weight_OD: Tensor, bias_O: Tensor | None) -> LinearWeight:
        """See `KernelBackend.prepare_linear`: kept as it is."""
        out_features, in_features = weight_OD.shape
        return LinearWeight(_align(weight_OD), bias_O, in_features, out_features)

    def prepare_embedding(self, table_VD: Tensor, tied_head: LinearWeight | None) -> LinearWeight:
        """See `KernelBackend.prepare_embedding`: as it is, once."""
        return self.prepare_linear(table_VD, None) if tied_head is None else tied_head

    def look_up(self, tables: Tables, token_ids_T: Tensor, positions_T: Tensor) -> tuple[Tensor, Rotation]:
        """See `KernelBackend.look_up`; ids and positions may be in CPU memory."""
        token_ids_T, positions_T = token_ids_T.to(self._device), positions_T.to(self._device)
        return tables.embedding.data.index_select(0, token_ids_T), tables.rotation.select(positions_T)

    def linear(self, x_TD: Tensor, weight: LinearWeight) -> Tensor:
        """See `KernelBackend.linear`."""
        return multiply(_align(x_TD), weight, self._dtype)

    def linear_float32(self, x_TD: Tensor, weight: LinearWeight, out_TO: Tensor | None = None) -> Tensor:
        """See `KernelBackend.linear_float32`: the accumulators as they are; ``out`` may be in CPU memory."""
        product_TO = multiply(_align(x_TD), weight, torch.float32)
        return product_TO if out_TO is None else out_TO.copy_(product_TO)

    def linear_argmax(self, x_TD: Tensor, weight: LinearWeight) -> tuple[Tensor, Tensor]:
        """See `KernelBackend.linear_argmax`."""
        return find_row_maxima(self.linear_float32(x_TD, weight))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `KernelBackend.rms_norm`."""
        return elementwise.rms_norm(_align(x), None, weight, eps)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """See `KernelBackend.add_rms_norm`."""
        assert residual_TD.is_contiguous()
        return elementwise.rms_norm(_align(x_TD), residual_TD, weight_D, eps)

    def build_plan(self, metadata: AttentionMetadata, kv_cache: Tensor, num_heads: int, scale: float) -> AttentionPlan:
        """See `KernelBackend.build_plan`."""
        tokens_per_item = count_item_tokens(num_heads // kv_cache.shape[3])
        plan = TritonPlan(DeviceStep.build(metadata, tokens_per_item, self._device), scale)
        if self._flash_attention is None:
            return plan
        return FlashPlan(self._flash_attention, plan, metadata, kv_cache, scale)

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        """See `KernelBackend.silu_mul`."""
        return elementwise.silu_mul(_align(gate_up_T2I))

    def build_decoder(self, layers: Sequence[LayerWeights], final_norm: Tensor, shape: DecoderShape) -> FusedDecoder:
        """See `pdserve.kernels.decoder.FusingBackend.build_decoder`."""
        loop = LayerLoop(self, layers, final_norm, shape)
        return loop if self._capture is None else GraphDecoder(loop, self._capture)


def describe_target(device: torch.device) -> str:
    """What code is made for: equal names and Triton versions give equal code."""
    if device.type == "cpu":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def _align(x: Tensor) -> Tensor:
    """``x``, contiguous and aligned, so that every row goes through the same compiled kernel."""
    return x.contiguous() if x.data_ptr() % ALIGNMENT_BYTES == 0 else x.clone(memory_format=torch.contiguous_format)
