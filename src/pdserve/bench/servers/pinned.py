"""First code of a benchmarked server: ``python -m pdserve.bench.servers.pinned PARENT CORES COMMAND…``.

Ties the process to the benchmark's life and to its cores, then becomes COMMAND. PARENT is the benchmark's process
id; CORES is a comma-separated list, ``-`` for all.
"""

from __future__ import annotations

import os
import sys

from pdserve.supervisor.child import die_with_parent


def main(arguments: list[str]) -> None:
    """Prepare this process, then become the command."""
    parent, cores, *command = arguments
    die_with_parent(int(parent))
    if cores != "-":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
