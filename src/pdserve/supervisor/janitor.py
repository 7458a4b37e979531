"""Cleans up behind a supervisor, however it ended: ``python -I -S janitor.py DIRECTORY GRACE_S``.

Standard input is a pipe from the supervisor. A line ``123`` says that process group 123 was started. When the
pipe ends, so has the supervisor, by its own will or not: groups that are still alive after GRACE_S seconds are
killed, and DIRECTORY is removed. Runs as a script without the package: it has to start in milliseconds.
"""

import os
import shutil
import signal
import sys
import time

_POLL_S = 0.05


def main(directory: str, grace_s: float) -> None:
    """Wait for the end of standard input, then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups = [int(line) for line in sys.stdin]
    deadline_s = time.monotonic() + grace_s
    while any(_is_alive(group) for group in groups) and time.monotonic() < deadline_s:
        time.sleep(_POLL_S)
    for group in groups:
        if _is_alive(group):
            os.killpg(group, signal.SIGKILL)
    shutil.rmtree(directory, ignore_errors=True)


def _is_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
