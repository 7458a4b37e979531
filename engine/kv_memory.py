"""KV memory: how many blocks fit, and the one tensor they live in."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from pdserve.engine.config import CacheSettings
from pdserve.errors import ConfigError
from pdserve.kv_layout import KVCacheSpec

CPU = torch.device("cpu")
TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def resolve_num_blocks(settings: CacheSettings, spec: KVCacheSpec, device: torch.device = CPU) -> int:
    """Blocks in the pool: as given, or as many as the fraction of the device's memory available now holds.

    Raises:
        ConfigError: not even one request of a few blocks fits, or the fraction is out of range.
    """
    if settings.num_blocks is not None:
        if settings.num_blocks < 1:
            raise ConfigError(f"num_blocks is {settings.num_blocks}; it must be at least 1")
        return settings.num_blocks
    if not 0.0 < settings.memory_fraction <= 0.95:
        raise ConfigError(f"memory_fraction is {settings.memory_fraction}; it must be above 0 and at most 0.95")
    available = get_available_memory_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    budget = int(available * settings.memory_fraction)
    num_blocks = budget // spec.block_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"memory_fraction {settings.memory_fraction} of the available memory is {budget} bytes, less than two KV "
            f"blocks of {spec.block_bytes} bytes; raise memory_fraction or set num_blocks"
        )
    return num_blocks


def get_available_memory_bytes() -> int:
    """Memory this process may still take: the machine's available memory, within its control group's limit."""
    available = _read_meminfo("MemAvailable")
    limit_file, usage_file = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit_file.exists() and usage_file.exists():
        limit = limit_file.read_text().strip()
        if limit != "max":
            available = min(available, max(int(limit) - int(usage_file.read_text()), 0))
    return available


def _read_meminfo(key: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise ConfigError(f"/proc/meminfo has no {key}; set num_blocks")


def allocate_kv_cache(spec: KVCacheSpec, num_blocks: int, device: torch.device = CPU) -> Tensor:
    """The pool: ``[num_blocks, L, 2, K, S, H]``, contiguous, in CPU memory on huge pages where the system gives them.

    The CPU's pages are taken from the system as blocks are first written, so an idle instance costs little.

    Raises:
        ConfigError: the address space, or the GPU's memory, cannot be had.
    """
    num_bytes = num_blocks * spec.block_bytes
    if device.type != "cpu":
        try:
            return torch.empty(num_blocks, *spec.block_shape, dtype=TORCH_DTYPES[spec.dtype], device=device)
        except torch.cuda.OutOfMemoryError as error:
            raise ConfigError(
                f"{num_bytes} bytes of KV memory ({num_blocks} blocks) cannot be had on {device}; lower "
                "memory_fraction or num_blocks"
            ) from error
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(f"{num_bytes} bytes of KV memory ({num_blocks} blocks) cannot be had: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(memory, dtype=TORCH_DTYPES[spec.dtype])
    return flat.view(num_blocks, *spec.block_shape)
