"""A network of its own for a peer or a server, at the end of a cable that can be pulled.

A Linux network namespace and a pair of virtual Ethernet devices: what is on its way when the cable is pulled is lost
without a word, as between two machines. No proxy does that: whoever closes a socket tells the other end.
"""

from __future__ import annotations

import contextlib
import secrets
import subprocess
from collections.abc import Iterator
from typing import Self

from pdserve.connectors.testing.violations import NotOfferedError

_TIMEOUT_S = 30.0
_PREFIX_BITS = 30
_HOLD = "mount -t sysfs sysfs /sys && echo ready && exec cat"
"""Waits for its end; /sys is mounted anew, for that is where UCX looks for the network's devices."""


class SeveredNetwork:
    """A context manager; what runs in the network must have ended before it is left.

    Attributes:
        address: of whoever listens in the network, seen from here.
        here: of this end of the cable.
        device: this end's name.
        far_device: the other end's name, in the network.

    Raises:
        NotOfferedError: on entry: this process may not make one, or ``ip``, ``nsenter`` or ``unshare`` is missing.
    """

    def __init__(self) -> None:
        tag = secrets.token_hex(3)
        subnet = f"10.{100 + secrets.randbelow(100)}.{secrets.randbelow(256)}"
        self.here, self.address = f"{subnet}.1", f"{subnet}.2"
        self.device, self.far_device = f"pds{tag}a", f"pds{tag}b"
        self._holder: subprocess.Popen[bytes] | None = None

    @property
    def command_prefix(self) -> tuple[str, ...]:
        """What to put in front of a command that is to run in the network; it keeps its process id."""
        assert self._holder is not None
        return ("nsenter", "--target", str(self._holder.pid), "--net", "--mount", "--")

    def __enter__(self) -> Self:
        try:
            self._holder = subprocess.Popen(
                ["unshare", "--net", "--mount", "sh", "-c", _HOLD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            assert self._holder.stdout is not None
            if self._holder.stdout.readline() != b"ready\n":
                raise NotOfferedError("making a network namespace needs privileges")
            self._lay_cable()
        except FileNotFoundError as missing:
            self._close()
            raise NotOfferedError(f"{missing.filename} is not installed") from missing
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @contextlib.contextmanager
    def cable_pulled(self) -> Iterator[None]:
        """Inside, nothing gets through in either direction, and nobody is told."""
        self._run_inside("ip", "link", "set", self.far_device, "down")
        try:
            yield
        finally:
            self._run_inside("ip", "link", "set", self.far_device, "up")

    def _lay_cable(self) -> None:
        assert self._holder is not None
        holder = str(self._holder.pid)
        _run("ip", "link", "add", self.device, "type", "veth", "peer", "name", self.far_device, "netns", holder)
        _run("ip", "address", "add", f"{self.here}/{_PREFIX_BITS}", "dev", self.device)
        _run("ip", "link", "set", self.device, "up")
        self._run_inside("ip", "address", "add", f"{self.address}/{_PREFIX_BITS}", "dev", self.far_device)
        for device in ("lo", self.far_device):
            self._run_inside("ip", "link", "set", device, "up")

    def _run_inside(self, *command: str) -> None:
        _run(*self.command_prefix, *command)

    def _close(self) -> None:
        """The devices go with the network, and the network with the last process in it. Idempotent."""
        holder, self._holder = self._holder, None
        if holder is None:
            return
        holder.kill()
        holder.wait()
        for pipe in (holder.stdin, holder.stdout):
            if pipe is not None:
                pipe.close()


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        raise NotOfferedError(f"{' '.join(command)}: {done.stderr.strip()}")
