"""One supervised process: started in a group of its own, its lines collected, ended by request or by force."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from pdserve import env

_KEPT_LINES = 50
_ERROR_PREFIX = "error: "
_MAX_LINE_CHARS = 8192
_LAST_LINES_TIMEOUT_S = 1.0


class ManagedProcess:
    """A child that runs a module of pdserve's. Start it on a thread that lives as long as the supervisor.

    Args:
        name: what people read, for example ``prefill-0``.
        module: the module to run as ``__main__``.
        arguments: its command line.
        cores: the cores it may use; None = all.
        log_level: what it logs.
        show_line: gets each of its lines of output but those that tell an error: the supervisor reports these.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        *,
        cores: Sequence[int] | None,
        log_level: str,
        show_line: Callable[[str], None],
    ) -> None:
        self.name = name
        self._lines: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._show_line = show_line
        pinned = ",".join(map(str, cores)) if cores else "-"
        # A session of its own: Ctrl-C in the terminal reaches the supervisor alone, which ends things in order.
        self._popen = subprocess.Popen(
            [
                sys.executable,
                "-P",
                "-u",
                "-m",
                "pdserve.supervisor.child",
                str(os.getpid()),
                pinned,
                module,
                *arguments,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env=env.child_environment(log_level),
        )
        self._reader = threading.Thread(target=self._read_lines, name=f"log-{name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id, which is also its process group's."""
        return self._popen.pid

    def poll_status(self) -> int | None:
        """The exit status once it has ended (minus the number of the signal that killed it), else None."""
        return self._popen.poll()

    def terminate(self) -> None:
        """Ask it to end."""
        if self.poll_status() is None:
            self._popen.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and all it started, at once, and wait for that."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()
        self._reader.join(_LAST_LINES_TIMEOUT_S)

    def describe_end(self) -> str:
        """How it ended and why, in a few words: its own error line, else its status and its last line."""
        self._reader.join(_LAST_LINES_TIMEOUT_S)
        for line in reversed(self._lines):
            if line.startswith(_ERROR_PREFIX):
                return line.removeprefix(_ERROR_PREFIX)
        status = self.poll_status() or 0
        how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return f"{how}: {self._lines[-1]}" if self._lines and status > 0 else how

    def _read_lines(self) -> None:
        stream = self._popen.stdout
        assert stream is not None
        with stream:
            while line := stream.readline(_MAX_LINE_CHARS):
                line = line.rstrip()
                self._lines.append(line)
                if not line.startswith(_ERROR_PREFIX):
                    self._show_line(f"{self.name} | {line}")
