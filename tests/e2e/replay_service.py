"""A router over instances that replay tokens, for tests of what talks to a service."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
from processes import find_free_port, wait_until

REPLAY = str(Path(__file__).parent.parent / "replay_instance.py")


@contextlib.contextmanager
def replay_service(
    directory: Path, *, instance_options: Sequence[str] = (), router_options: Sequence[str] = ()
) -> Iterator[str]:
    """One prefill and one decode instance and their router; its address."""
    port = find_free_port()
    processes: list[subprocess.Popen[bytes]] = []
    router = [sys.executable, "-m", "pdserve.router.main", "--port", str(port), *router_options]
    try:
        for role in ("prefill", "decode"):
            instance_port = find_free_port()
            command = [sys.executable, REPLAY, "--role", role, "--port", str(instance_port), *instance_options]
            processes.append(subprocess.Popen(command))
            router += [f"--{role}", f"127.0.0.1:{instance_port}"]
        with (directory / "router.log").open("wb") as log:
            processes.append(subprocess.Popen(router, stdout=log, stderr=log))
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: _is_served(url), "the replay service being ready")
        yield url
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _is_served(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        response = httpx.get(f"{url}/ready")
        return response.status_code == 200 and response.json()["pools"]["prefill"]["usable"] == 1
    return False
