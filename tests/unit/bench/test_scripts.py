"""The scripts that nothing imports start: those of benchmarks/, and the soak."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
ASK_ALL = """
import runpy, sys
for path in sys.argv[1:]:
    print(path, flush=True)
    sys.argv = [path, "--help"]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        assert not end.code, path
"""


def test_each_script_says_what_it_takes() -> None:
    folders = [path.parent for path in ROOT.glob("benchmarks/*/__main__.py")]
    scripts = [str(path) for path in (*ROOT.glob("benchmarks/*.py"), *folders, ROOT / "tests" / "soak" / "soak.py")]
    done = subprocess.run(
        [sys.executable, "-c", ASK_ALL, *scripts], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout.splitlines()[-1] + done.stderr
    assert len(scripts) > 5
    assert done.stdout.count("usage: ") == len(scripts)
