"""What computing on a GPU needs, looked at before anything is loaded. Knows neither Triton's nor flash-attn's code."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

from pdserve.errors import ConfigError

MIN_CAPABILITY = (8, 0)
"""Products of bfloat16 on tensor cores: NVIDIA's Ampere and newer."""
MIN_FLASH_ATTN = (2, 6)


def require_gpu() -> torch.device:
    """The GPU that this process computes on: the first one that it sees.

    Raises:
        ConfigError: there is none, it is too old, or torch or Triton cannot use it.
    """
    if torch.version.cuda is None:
        raise ConfigError(
            f"device cuda: torch {torch.__version__} is built without CUDA; install a CUDA build, or use device cpu"
        )
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device cuda: torch {torch.__version__} finds no usable GPU; look at nvidia-smi and "
            "CUDA_VISIBLE_DEVICES, or use device cpu"
        )
    device = torch.device("cuda", 0)
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < MIN_CAPABILITY:
        raise ConfigError(
            f"device cuda: {torch.cuda.get_device_name(device)} has compute capability {major}.{minor}; pdserve's "
            f"kernels need {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or newer"
        )
    if find_spec("triton") is None:
        raise ConfigError("device cuda: Triton is missing; install pdserve[gpu]")
    return device


def require_flash_attn() -> str:
    """The version of flash-attn that is installed.

    Raises:
        ConfigError: there is none, or it is too old.
    """
    try:
        found = version("flash-attn")
    except PackageNotFoundError as error:
        raise ConfigError(
            "kernel backend flash-attn: the package flash-attn is missing; install it (it is compiled against the "
            "installed torch), or use triton"
        ) from error
    if tuple(int(part) for part in found.split(".")[:2]) < MIN_FLASH_ATTN:
        raise ConfigError(f"kernel backend flash-attn: version {found} is too old; install 2.6 or newer, or use triton")
    return found
