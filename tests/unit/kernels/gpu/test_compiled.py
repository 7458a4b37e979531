"""Every kernel compiles for a GPU, products on its tensor cores: Triton needs no GPU for that."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pdserve[gpu]")


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """In a process of its own: this one's Triton interprets."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert len(lines) == 5
    assert lines["linear_kernel"] == lines["attend_kernel"] == "sm90 wgmma"
