"""The machine's rates on the very cores that servers are pinned to, measured by a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pdserve.bench.measure.model_floors import MachineRates
from pdserve.supervisor.placement import can_pin

_RATE_FIELDS = ("num_threads", "read_bytes_per_s", "copy_bytes_per_s", "flops")


def measure_pinned_rates(cores: Sequence[int], model: str, dtype: str, seconds: float) -> MachineRates | None:
    """What memory and arithmetic give on ``cores``, with a thread for each.

    Args:
        cores: to pin to.
        model: whose dtype's products are measured.
        dtype: of the products.
        seconds: how long to try for each figure; 0 = do not measure.

    Returns:
        None when nothing was to be measured or the measuring process failed: floors are for orientation, and a
        comparison does not fail for the lack of them.
    """
    if seconds <= 0:
        return None
    pinned = ",".join(map(str, cores)) if can_pin() else "-"
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-") as directory:
        path = Path(directory, "floors.json")
        command = [
            *(sys.executable, "-P", "-m", "pdserve.bench.servers.pinned", str(os.getpid()), pinned),
            *(sys.executable, "-P", "-m", "pdserve.cli", "bench", "floors", "--model", model, "--dtype", dtype),
            *("--num-threads", str(len(cores)), "--seconds", str(seconds), "--output", str(path)),
        ]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.returncode != 0:
            return None
        (floors,) = json.loads(path.read_text(encoding="utf-8"))["floors"]
    return MachineRates(**{name: floors[name] for name in _RATE_FIELDS})
