"""A directory that lives as long as its supervisor, and the janitor that removes it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from pdserve.supervisor import janitor

_SHARED_MEMORY = Path("/dev/shm")
_CLOSE_TIMEOUT_S = 15.0


class RunDirectory:
    """Fresh directory for ready files and, by default, KV blocks: in memory where the system has that.

    Args:
        grace_s: processes that outlive a supervisor which was killed have this long before they are.
    """

    def __init__(self, grace_s: float) -> None:
        parent = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK | os.X_OK) else None
        self.path = Path(tempfile.mkdtemp(prefix="pdserve-up-", dir=parent))
        self._janitor = subprocess.Popen(
            [sys.executable, "-I", "-S", janitor.__file__, str(self.path), str(grace_s)],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def watch(self, process_group: int) -> None:
        """Have the janitor kill this process group if the supervisor cannot."""
        stream = self._janitor.stdin
        assert stream is not None
        stream.write(f"{process_group}\n")
        stream.flush()

    def close(self) -> None:
        """Remove the directory; call when all processes have ended. Idempotent."""
        stream = self._janitor.stdin
        assert stream is not None
        stream.close()
        self._janitor.wait(_CLOSE_TIMEOUT_S)
