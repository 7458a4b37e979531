"""Kernel backends by name."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from pdserve.errors import ConfigError
from pdserve.kernels.base import KernelBackend
from pdserve.kernels.matmul import OneDnnMatmul, build_matmul
from pdserve.kernels.torch_backend import TorchBackend

MATMULS: Mapping[str, str] = {"reference": "plain", "onednn": "onednn"}
"""Backend name -> how it multiplies."""
DTYPES = (torch.bfloat16, torch.float32)


def backend_names() -> tuple[str, ...]:
    """All names that `get_backend` accepts besides ``auto``."""
    return tuple(MATMULS)


def get_backend(name: str, dtype: torch.dtype) -> KernelBackend:
    """The backend called ``name``; ``auto`` is the fastest that runs here.

    Raises:
        ConfigError: the name or dtype is unknown, or something that the backend needs is missing.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype} is not supported; use bfloat16 or float32")
    if name == "auto":
        name = "reference" if OneDnnMatmul.explain_missing(dtype) else "onednn"
    if name not in MATMULS:
        raise ConfigError(f"kernel backend {name!r} is unknown; use auto, {', '.join(MATMULS)}")
    return TorchBackend(name, dtype, build_matmul(MATMULS[name], dtype))
