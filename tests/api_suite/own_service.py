"""Our own service on this machine: prefill and decode instances, and a second router over the decode instance alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
from processes import Deployment, ManagedProcess, wait_until

from pdserve.connectors.testing.free_port import find_free_port


@contextlib.contextmanager
def start_own_service(directory: Path) -> Iterator[tuple[Deployment, str]]:
    """The service, and the address of the router whose requests decode does whole: the reference."""
    policies = ["--prefill-policy", "prefix_aware", "--decode-policy", "prefix_aware"]
    with Deployment(
        directory, engine_options=["--max-num-batched-tokens", "32"], router_options=policies
    ) as deployment:
        port = find_free_port()
        command = ["pdserve.router.main", "--port", str(port), "--decode", deployment.address_of("decode")]
        reference = ManagedProcess("reference", command, directory)
        reference.start()
        url = f"http://127.0.0.1:{port}"
        try:
            reference.wait_ready()
            wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200, "the reference router being ready")
            yield deployment, url
        finally:
            reference.kill()
