"""Memory that processes share and that has no name: it goes with the last process that has it open."""

from __future__ import annotations

import os

from pdserve.errors import ConfigError


def create_shared_memory(purpose: str, num_bytes: int) -> int:
    """New memory, all zeros; a file descriptor to hand to other processes and to map.

    Args:
        purpose: seen in /proc only.
        num_bytes: pages are taken from the system as they are written.

    Raises:
        ConfigError: this system has none.
    """
    if not hasattr(os, "memfd_create"):
        raise ConfigError("several worker processes need Linux; set tensor and pipeline parallel sizes to 1")
    fd = os.memfd_create(f"pdserve-{purpose}")
    os.ftruncate(fd, num_bytes)
    return fd
