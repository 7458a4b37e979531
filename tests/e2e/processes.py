"""Real processes for the end-to-end tests: instances and routers on loopback, killed and restarted at will."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from pdserve.connectors.testing.free_port import find_free_port

START_TIMEOUT_S = 90.0


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 30.0) -> Any:
    """Poll until the condition holds; its value."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
        time.sleep(0.05)


@dataclass
class ManagedProcess:
    """One of pdserve's processes, with its log in a file."""

    name: str
    command: list[str]
    directory: Path
    process: subprocess.Popen[bytes] | None = None
    num_starts: int = 0
    ready: dict[str, Any] = field(default_factory=dict)

    @property
    def log(self) -> Path:
        return self.directory / f"{self.name}.log"

    @property
    def ready_file(self) -> Path:
        return self.directory / f"{self.name}.json"

    def start(self) -> None:
        self.ready_file.unlink(missing_ok=True)
        self.num_starts += 1
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self.command, "--ready-file", str(self.ready_file)],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def wait_ready(self) -> None:
        def is_ready() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, f"{self.name} ended:\n{self.log.read_text()[-2000:]}"
            return self.ready_file.exists()

        wait_until(is_ready, f"{self.name} being ready", START_TIMEOUT_S)
        self.ready = json.loads(self.ready_file.read_text())

    def kill(self) -> None:
        """As with kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self, timeout_s: float = 40.0) -> int:
        """As with kill or Ctrl-C; the exit status."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def get_metric(self, name: str) -> float:
        """A metric's value, summed over its labels, from the process's own HTTP port."""
        text = httpx.get(f"{self.ready['http']}/metrics", timeout=30).text
        lines = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def holds_no_block(instance: ManagedProcess) -> bool:
    return instance.get_metric("pdserve_kv_blocks_used") == 0


class Deployment:
    """N prefill and M decode instances and a router.

    Args:
        directory: logs, ready files and the store.
        num_prefill: N.
        num_decode: M.
        engine_options: more options for every instance.
        router_options: more options for the router.
        store_option: let the connector's ``path`` be a directory of this deployment.
    """

    def __init__(
        self,
        directory: Path,
        *,
        num_prefill: int = 1,
        num_decode: int = 1,
        engine_options: list[str] | None = None,
        router_options: list[str] | None = None,
        store_option: bool = True,
    ) -> None:
        self.directory = directory
        options = ["--num-blocks", "2048", "--connector", "shared_storage", *(engine_options or [])]
        if store_option:
            options += ["--connector-option", f"path={directory / 'store'}"]
        self.prefill = [self._build_instance("prefill", i, options) for i in range(num_prefill)]
        self.decode = [self._build_instance("decode", i, options) for i in range(num_decode)]
        self.port = find_free_port()
        command = ["pdserve.router.main", "--port", str(self.port)]
        for role, instances in (("prefill", self.prefill), ("decode", self.decode)):
            for instance in instances:
                command += [f"--{role}", f"127.0.0.1:{instance.command[2]}"]
        self.router = ManagedProcess("router", [*command, *(router_options or [])], directory)

    def _build_instance(self, role: str, index: int, options: list[str]) -> ManagedProcess:
        command = [f"pdserve.{role}.main", "--port", str(find_free_port()), "--http-port", "0", *options]
        return ManagedProcess(f"{role}-{index}", command, self.directory)

    @property
    def instances(self) -> list[ManagedProcess]:
        return [*self.prefill, *self.decode]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def address_of(self, role: str, index: int = 0) -> str:
        """Where an instance's routers connect."""
        return f"127.0.0.1:{getattr(self, role)[index].command[2]}"

    def __enter__(self) -> Deployment:
        for process in (*self.instances, self.router):
            process.start()
        try:
            for process in (*self.instances, self.router):
                process.wait_ready()
            self.wait_served()
        except BaseException:
            self.kill_all()
            raise
        return self

    def wait_served(self) -> None:
        """Until the router says that it could serve a request."""

        def is_served() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{self.url}/ready", timeout=5).status_code == 200
            return False

        wait_until(is_served, "the router being ready", START_TIMEOUT_S)

    def __exit__(self, *_: object) -> None:
        self.kill_all()

    def kill_all(self) -> None:
        for process in (self.router, *self.instances):
            if process.is_alive:
                process.kill()

    def stop(self) -> dict[str, int]:
        """End everything in order; exit statuses by name."""
        return {process.name: process.stop() for process in (self.router, *self.instances)}

    def wait_idle(self, timeout_s: float = 30.0) -> None:
        """Until no instance holds a block."""
        for instance in self.instances:
            wait_until(partial(holds_no_block, instance), f"blocks of {instance.name} coming back", timeout_s)
