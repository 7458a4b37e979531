"""Kernel backends by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from pdserve.errors import ConfigError
from pdserve.kernels.base import KernelBackend
from pdserve.kernels.cpp_backend import CppBackend
from pdserve.kernels.linear_format import LINEAR_FORMATS
from pdserve.kernels.matmul import OneDnnMatmul, build_matmul
from pdserve.kernels.torch_backend import TorchBackend

logger = logging.getLogger(__name__)

CPP = "cpp"
MATMULS: Mapping[str, str] = {"reference": "plain", "onednn": "onednn"}
"""Name of a backend in torch -> how it multiplies."""
DTYPES = (torch.bfloat16, torch.float32)
NOT_QUANTIZED = "none"


def backend_names() -> tuple[str, ...]:
    """All names that `get_backend` accepts besides ``auto``."""
    return (CPP, *MATMULS)


def get_backend(name: str, dtype: torch.dtype, quantization: str = NOT_QUANTIZED) -> KernelBackend:
    """The backend called ``name``; ``auto`` is the fastest that runs here.

    Args:
        name: of the backend.
        dtype: of activations, and of weights that are not quantised.
        quantization: of linear layers' weights, see `pdserve.kernels.linear_format`.

    Raises:
        ConfigError: a name or dtype is unknown, the backend has no such quantisation, or something that it needs is
            missing.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype} is not supported; use bfloat16 or float32")
    if quantization not in LINEAR_FORMATS:
        raise ConfigError(f"quantization {quantization!r} is unknown; use {', '.join(LINEAR_FORMATS)}")
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


def _choose_backend(dtype: torch.dtype) -> KernelBackend:
    """Compiled kernels where there are any, else torch with oneDNN, else torch alone."""
    if dtype == torch.bfloat16:
        try:
            return CppBackend()
        except ConfigError as error:
            logger.warning("computing with torch, which is slower: %s", error)
    name = "reference" if OneDnnMatmul.explain_missing(dtype) else "onednn"
    return TorchBackend(name, dtype, build_matmul(MATMULS[name], dtype))
