"""A real router process over instances that replay tokens, for tests that need no model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import openai
from processes import wait_until

from pdserve.connectors.testing.free_port import find_free_port

MODEL = "smollm2-135m-instruct"
REPLAY = str(Path(__file__).parent.parent / "replay_instance.py")
PROMPT = "The house stands on a hill"
NUM_TOKENS = 60
VOCAB_SIZE = 49152


@dataclass
class Replay:
    """One replaying instance's process."""

    role: str
    directory: Path
    options: list[str] = field(default_factory=list)
    port: int = field(default_factory=find_free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def stats(self) -> dict[str, int]:
        path = self.directory / f"{self.port}.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def start(self) -> Replay:
        command = [sys.executable, REPLAY, "--role", self.role, "--port", str(self.port)]
        command += ["--stats-file", str(self.directory / f"{self.port}.json"), *self.options]
        self.process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return self

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


class Service:
    """A router over replaying instances."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.instances: list[Replay] = []
        self.port = find_free_port()
        self.log = directory / "router.log"
        self.router: subprocess.Popen[bytes] | None = None

    def add(self, role: str, *options: str) -> Replay:
        self.instances.append(Replay(role, self.directory, list(options)).start())
        return self.instances[-1]

    def start(self, *options: str, is_listed: bool = True) -> Service:
        """Start the router; without ``is_listed`` its options say where the instances are."""
        command = [sys.executable, "-m", "pdserve.router.main", "--port", str(self.port), *options]
        for instance in self.instances if is_listed else ():
            command += [f"--{instance.role}", instance.address]
        with self.log.open("wb") as log:
            self.router = subprocess.Popen(command, stdout=log, stderr=log)
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @cached_property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def get_pools(self) -> dict[str, int]:
        with contextlib.suppress(httpx.TransportError):
            pools = httpx.get(f"{self.url}/ready").json()["pools"]
            return {role: pool["usable"] for role, pool in pools.items()}
        return {}

    def wait_for(self, prefill: int, decode: int) -> Service:
        wait_until(
            lambda: self.get_pools() == {"prefill": prefill, "decode": decode},
            f"{prefill} prefill and {decode} decode instances being usable",
        )
        return self

    def complete(self, **fields: Any) -> Any:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": NUM_TOKENS, "seed": 1, **fields}
        return self.client.completions.create(**body)

    def stream_text(self, **fields: Any) -> Iterator[str]:
        with self.complete(stream=True, **fields) as stream:
            for chunk in stream:
                yield "".join(choice.text for choice in chunk.choices)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=30).raise_for_status()

    def get_metric(self, name: str) -> float:
        lines = self.get("/metrics").text.splitlines()
        found = [line for line in lines if line.split("{")[0].split(" ")[0] == f"pdserve_router_{name}"]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def close(self) -> None:
        self.client.close()
        for process in (self.router, *(instance.process for instance in self.instances)):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()


@contextlib.contextmanager
def replay_service(
    directory: Path, *, instance_options: Sequence[str] = (), router_options: Sequence[str] = ()
) -> Iterator[str]:
    """One prefill and one decode instance and their router; its address."""
    made = Service(directory)
    try:
        for role in ("prefill", "decode"):
            made.add(role, *instance_options)
        yield made.start(*router_options).wait_for(1, 1).url
    finally:
        made.close()
