"""The compiled backend: kernels in C++ (csrc/) for the instruction set that this processor has.

Activations are bfloat16; weights may be quantised (`linear_format`).

Rows don't depend on one another by construction, not by measurement: every sum has one accumulator that runs over its
inputs in one order, whatever the number of rows, threads or chunks (csrc/gemm.h, csrc/attention.h). Instruction sets
may round differently from one another; the numerics string tells them apart.

Knows torch tensors as memory only: shapes and dtypes are checked here, the library trusts what it is given.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from ctypes import byref

import torch
from torch import Tensor

from pdserve.kernels import cpp_kernels
from pdserve.kernels.base import AttentionMetadata, LinearWeight, Rotation, Tables
from pdserve.kernels.cpp_attention import CppAttention
from pdserve.kernels.cpp_decoder import CppDecoder
from pdserve.kernels.cpp_vocabulary import find_largest, look_up
from pdserve.kernels.decoder import DecoderShape, LayerWeights
from pdserve.kernels.linear_format import LINEAR_FORMATS, LinearFormat, build_linear
from pdserve.kernels.native_library import choose_variant, load_library
from pdserve.kernels.weight_memory import WeightMemory

NUMERICS_VERSION = 2
"""Raised when the order or rounding of any sum changes."""


class CppBackend:
    """`pdserve.kernels.base.KernelBackend` in C++.

    Args:
        variant: the instruction set, by `native_build.Variant`'s name; None = the best this processor has.
        num_threads: compute threads; None = torch's own number at each call.
        quantization: of the weights of linear layers, a key of `LINEAR_FORMATS`.

    Raises:
        ConfigError: the processor doesn't run ``variant``, or its library is not there and cannot be compiled.
    """

    def __init__(self, variant: str | None = None, num_threads: int | None = None, quantization: str = "none") -> None:
        chosen = choose_variant(variant)
        self._variant = chosen.name
        self._library = load_library(chosen)
        self._num_threads = num_threads
        self._memory = WeightMemory()
        self._format = LINEAR_FORMATS[quantization]
        arithmetic = "bfloat16" if quantization == "none" else f"bfloat16-{quantization}"
        self._numerics = f"cpp/{NUMERICS_VERSION}/{self._variant}/{arithmetic}/{self._probe_digest()}"

    @property
    def name(self) -> str:
        """See `KernelBackend`."""
        return "cpp"

    @property
    def dtype(self) -> torch.dtype:
        """See `KernelBackend`."""
        return torch.bfloat16

    @property
    def device(self) -> torch.device:
        """See `KernelBackend`."""
        return torch.device("cpu")

    @property
    def numerics(self) -> str:
        """See `KernelBackend`."""
        return self._numerics

    @property
    def variant(self) -> str:
        """The instruction set it was compiled for."""
        return self._variant

    def get_num_threads(self) -> int:
        """Threads that the next call computes with."""
        return self._num_threads or torch.get_num_threads()

    def prepare_linear(self, weight_OD: Tensor, bias_O: Tensor | None) -> LinearWeight:
        """See `KernelBackend.prepare_linear`: copied into panels, on huge pages."""
        return self._pack(weight_OD, bias_O, self._format)

    def prepare_embedding(self, table_VD: Tensor, tied_head: LinearWeight | None) -> LinearWeight:
        """See `KernelBackend.prepare_embedding`: bfloat16 panels, the output head's own where it has them."""
        if tied_head is not None and tied_head.data.dtype == torch.bfloat16:
            return tied_head
        return self._pack(table_VD, None, LINEAR_FORMATS["none"])

    def look_up(self, tables: Tables, token_ids_T: Tensor, positions_T: Tensor) -> tuple[Tensor, Rotation]:
        """See `KernelBackend.look_up`: out of the panels, which is a change of order, not of any bit."""
        return look_up(self._library, tables, token_ids_T, positions_T, self.get_num_threads())

    def linear(self, x_TD: Tensor, weight: LinearWeight) -> Tensor:
        """See `KernelBackend.linear`."""
        return self._multiply(x_TD, weight, torch.empty(x_TD.shape[0], weight.out_features, dtype=torch.bfloat16))

    def linear_float32(self, x_TD: Tensor, weight: LinearWeight, out_TO: Tensor | None = None) -> Tensor:
        """See `KernelBackend.linear_float32`: the accumulators as they are."""
        if out_TO is None:
            out_TO = torch.empty(x_TD.shape[0], weight.out_features, dtype=torch.float32)
        assert out_TO.dtype == torch.float32
        return self._multiply(x_TD, weight, out_TO)

    def linear_argmax(self, x_TD: Tensor, weight: LinearWeight) -> tuple[Tensor, Tensor]:
        """See `KernelBackend.linear_argmax`: searched a few panels at a time, while their outputs are in the cache."""
        return find_largest(self._library, _require_rows(x_TD), weight, self.get_num_threads())

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `KernelBackend.rms_norm`."""
        return cpp_kernels.rms_norm(x.contiguous(), weight.contiguous(), eps, self._variant, self.get_num_threads())

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """See `KernelBackend.add_rms_norm`."""
        return cpp_kernels.add_rms_norm(
            x_TD.contiguous(), residual_TD, weight_D.contiguous(), eps, self._variant, self.get_num_threads()
        )

    def build_plan(self, metadata: AttentionMetadata, kv_cache: Tensor, num_heads: int, scale: float) -> CppAttention:
        """See `KernelBackend.build_plan`."""
        return CppAttention(metadata, scale, self._variant, self.get_num_threads())

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        """See `KernelBackend.silu_mul`."""
        return cpp_kernels.silu_mul(gate_up_T2I.contiguous(), self._variant, self.get_num_threads())

    def build_decoder(self, layers: Sequence[LayerWeights], final_norm: Tensor, shape: DecoderShape) -> CppDecoder:
        """See `pdserve.kernels.decoder.FusingBackend.build_decoder`."""
        return CppDecoder(self._library, layers, final_norm, shape, self.get_num_threads)

    def _pack(self, weight_OD: Tensor, bias_O: Tensor | None, to_format: LinearFormat) -> LinearWeight:
        weight_OD = _require_rows(weight_OD)
        bias_O = None if bias_O is None else _require_plain(bias_O)
        out_features, in_features = weight_OD.shape
        packed = to_format.allocate(self._memory, out_features, in_features, bias_O)
        self._library.pds_pack_linear(weight_OD.data_ptr(), weight_OD.stride(0), byref(build_linear(packed)))
        return packed

    def _multiply(self, x_TD: Tensor, weight: LinearWeight, out_TO: Tensor) -> Tensor:
        cpp_kernels.multiply(self._library, _require_rows(x_TD), weight, out_TO, self.get_num_threads())
        return out_TO

    def _probe_digest(self) -> str:
        """Digest of small fixed products and functions, lest two processors that round differently look the same.

        The inputs are exact fractions, the same on any machine.
        """
        values = (torch.arange(48 * 512) * 2654435761 % 65521).view(48, 512).to(torch.float64) / 65521 - 0.5
        inputs, weight = values[:16].to(torch.bfloat16), values[16:].to(torch.bfloat16)
        product = self.linear_float32(inputs, self.prepare_linear(weight, None))
        results = (
            product,
            self.rms_norm(inputs, weight[0], 1e-6),
            self.silu_mul(inputs),
            self._probe_attention(values),
        )
        content = b"".join(result.view(torch.uint8).numpy().tobytes() for result in results)
        return hashlib.sha256(content).hexdigest()[:8]

    def _probe_attention(self, values: Tensor) -> Tensor:
        """One token over 150 keys, two tiles, of both KV dtypes."""
        kv = (values[:40].reshape(-1)[: 10 * 2 * 16 * 64].view(10, 1, 2, 1, 16, 64) * 8).contiguous()
        q = (values[:3, :64].view(1, 3, 64) * 8).to(torch.bfloat16)
        metadata = AttentionMetadata.build([1], [150], [list(range(10))], 16)
        caches = (kv.to(dtype) for dtype in (torch.bfloat16, torch.float32))
        return torch.cat([self.build_plan(metadata, cache, 3, 0.125).attend(q, cache[:, 0]) for cache in caches])


def _require_rows(x_TD: Tensor) -> Tensor:
    """``x`` as bfloat16 rows, each of adjacent elements."""
    assert x_TD.dtype == torch.bfloat16
    assert x_TD.dim() == 2
    return x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()


def _require_plain(x: Tensor) -> Tensor:
    """``x`` as contiguous bfloat16."""
    assert x.dtype == torch.bfloat16
    return x.contiguous()
