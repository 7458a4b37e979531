"""Kernel backends by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from pdserve.errors import ConfigError
from pdserve.kernels.base import KernelBackend
from pdserve.kernels.cpp_backend import CppBackend
from pdserve.kernels.gpu.requirements import require_gpu
from pdserve.kernels.linear_format import LINEAR_FORMATS
from pdserve.kernels.matmul import OneDnnMatmul, build_matmul
from pdserve.kernels.torch_backend import TorchBackend

logger = logging.getLogger(__name__)

CPP = "cpp"
GPU_BACKENDS = ("triton", "flash-attn")
"""What computes on a GPU; ``auto`` is the first."""
MATMULS: Mapping[str, str] = {"reference": "plain", "onednn": "onednn"}
"""Name of a backend in torch -> how it multiplies."""
DTYPES = (torch.bfloat16, torch.float32)
NOT_QUANTIZED = "none"
DEVICES = ("cpu", "cuda")


def backend_names() -> tuple[str, ...]:
    """All names of CPU backends that `get_backend` accepts besides ``auto``."""
    return (CPP, *MATMULS)


def get_backend(name: str, dtype: torch.dtype, quantization: str = NOT_QUANTIZED, device: str = "cpu") -> KernelBackend:
    """The backend called ``name``; ``auto`` is the fastest that runs here.

    Args:
        name: of the backend.
        dtype: of activations, and of weights that are not quantised.
        quantization: of linear layers' weights, see `pdserve.kernels.linear_format`.
        device: ``cpu``, or ``cuda`` for the first GPU that the process sees.

    Raises:
        ConfigError: a name, dtype or device is unknown, the backend has no such quantisation, or something that it
            needs is missing.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype} is not supported; use bfloat16 or float32")
    if quantization not in LINEAR_FORMATS:
        raise ConfigError(f"quantization {quantization!r} is unknown; use {', '.join(LINEAR_FORMATS)}")
    if device not in DEVICES:
        raise ConfigError(f"device {device!r} is unknown; use {', '.join(DEVICES)}")
    if device == "cuda":
        return _get_gpu_backend(name, dtype, quantization)
    if name in GPU_BACKENDS:
        raise ConfigError(f"kernel backend {name!r} computes on a GPU; set device to cuda, or use auto")
    if quantization != NOT_QUANTIZED:
        if dtype != torch.bfloat16 or name not in ("auto", CPP):
            raise ConfigError(
                f"quantization {quantization} needs dtype bfloat16 and kernel backend cpp, not {dtype} and {name}"
            )
        return CppBackend(quantization=quantization)
    if name == "auto":
        return _choose_backend(dtype)
    if name == CPP:
        if dtype != torch.bfloat16:
            raise ConfigError(f"kernel backend 'cpp' computes in bfloat16, not {dtype}; use auto, {', '.join(MATMULS)}")
        return CppBackend()
    if name not in MATMULS:
        raise ConfigError(f"kernel backend {name!r} is unknown; use auto, {', '.join(backend_names())}")
    return TorchBackend(name, dtype, build_matmul(MATMULS[name], dtype))


def _get_gpu_backend(name: str, dtype: torch.dtype, quantization: str) -> KernelBackend:
    """See `get_backend`. Looks at the settings first, then at the machine, and only then loads Triton."""
    if quantization != NOT_QUANTIZED:
        raise ConfigError(f"quantization {quantization} needs device cpu")
    if name not in ("auto", *GPU_BACKENDS):
        raise ConfigError(f"kernel backend {name!r} does not compute on a GPU; use auto, {', '.join(GPU_BACKENDS)}")
    if name == "flash-attn" and dtype != torch.bfloat16:
        raise ConfigError(f"kernel backend flash-attn computes in bfloat16, not {dtype}; use triton")
    gpu = require_gpu()
    from pdserve.kernels.gpu.flash_attention import FlashAttention
    from pdserve.kernels.gpu.graph_decoder import CudaCapture
    from pdserve.kernels.gpu.triton_backend import TritonBackend

    if name == "flash-attn":
        return TritonBackend(dtype, gpu, flash_attention=FlashAttention.load())
    return TritonBackend(dtype, gpu, capture=CudaCapture())


def _choose_backend(dtype: torch.dtype) -> KernelBackend:
    """Compiled kernels where there are any, else torch with oneDNN, else torch alone."""
    if dtype == torch.bfloat16:
        try:
            return CppBackend()
        except ConfigError as error:
            logger.warning("computing with torch, which is slower: %s", error)
    name = "reference" if OneDnnMatmul.explain_missing(dtype) else "onednn"
    return TorchBackend(name, dtype, build_matmul(MATMULS[name], dtype))
