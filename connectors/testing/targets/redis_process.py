"""A real redis-server of a test's own: on a unix socket and, if asked for, on ports of its own; ended by its id."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

_START_TIMEOUT_S = 60.0
_POLL_S = 0.01


class RedisProcess:
    """One server, without persistence: what it held is gone when it is killed.

    Its directory is a short one below the system's temporary directory, for paths of unix sockets must be short.

    Args:
        arguments: more for the command line.
        port: of TCP; 0 = none.
        prefix: what the command is put behind, so that the server runs elsewhere; the process id stays.
    """

    def __init__(self, *arguments: str, port: int = 0, prefix: Sequence[str] = ()) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="pdserve-redis-"))
        self.port = port
        self.unix_path = self.directory / "s"
        self._command = [
            *prefix,
            *("redis-server", "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"),
            *("--dir", str(self.directory), "--port", str(port), "--unixsocket", str(self.unix_path)),
            *arguments,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    @staticmethod
    def is_installed() -> bool:
        """Whether there is a redis-server to start."""
        return shutil.which("redis-server") is not None

    @property
    def url(self) -> str:
        """Of the unix socket."""
        return f"unix://{self.unix_path}"

    def start(self) -> None:
        """Start it, and wait until it answers.

        Raises:
            RuntimeError: it ended at once, or does not answer in time.
        """
        self.unix_path.unlink(missing_ok=True)
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"does not start: {' '.join(self._command)}")
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """End it the hard way; idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait(_START_TIMEOUT_S)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """As if its machine slept: connections stay, new ones are taken, nothing answers."""
        if self._process is None:
            raise RuntimeError("it was not started")
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # until all of its threads have
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it and remove its directory; idempotent."""
        self.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(OSError):
            probe.settimeout(1.0)
            probe.connect(str(self.unix_path))
            probe.sendall(b"PING\r\n")
            return probe.recv(64)[:1] in (b"+", b"-")
        return False
