"""What machine the figures were taken on, for the reader of a report."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import pdserve
from pdserve.supervisor.placement import available_cores


def describe_machine() -> dict[str, Any]:
    """Processor, cores, load, Python and pdserve, as plain values."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "processor": _read_processor(),
        "cores": len(available_cores()),
        "load_average_1min": load,
        "system": platform.platform(),
        "python": platform.python_version(),
        "pdserve": pdserve.__version__,
    }


def _read_processor() -> str:
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
