"""First code of a supervised process: ``python -m pdserve.supervisor.child PARENT CORES MODULE ARGUMENT…``.

Ties the process to its parent's life and to its cores before anything heavy is imported, then runs MODULE as
``__main__``. PARENT is the supervisor's process id; CORES is a comma-separated list, ``-`` for all.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Prepare this process, then become the module."""
    parent, cores, module, *rest = arguments
    die_with_parent(int(parent))
    if cores != "-":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def die_with_parent(parent: int) -> None:
    """Have the kernel send SIGTERM when ``parent`` ends. Linux only; elsewhere the janitor alone sees to it."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    # The parent may have died before the call.
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
