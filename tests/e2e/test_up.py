"""``pdserve up`` as a user meets it: from the command line to nothing left."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from processes import wait_until

SMALL = ["--port", "0", "--num-blocks", "256", "--max-model-len", "1024"]
START_TIMEOUT_S = 120.0


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def run_directories() -> set[Path]:
    return set(Path("/dev/shm").glob("pdserve-up-*"))


class Up:
    """A running ``pdserve up`` and all it said."""

    def __init__(self, *options: str) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pdserve.cli", "up", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stream:
            self.lines.extend(line.rstrip() for line in iter(stream.readline, ""))

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str) -> re.Match[str]:
        def found() -> re.Match[str] | None:
            match = re.search(pattern, self.text, re.MULTILINE)
            assert match or self.process.poll() is None, f"it ended:\n{self.text}"
            return match

        match = wait_until(found, f"the line {pattern}", START_TIMEOUT_S)
        assert isinstance(match, re.Match)
        return match

    @property
    def url(self) -> str:
        return self.wait_for(r"^ready: (http://\S+)/v1 ")[1]

    def pid_of(self, name: str) -> int:
        return int(self.wait_for(rf"^{name}  +(\d+) ")[1])

    def pids(self) -> list[int]:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        status = self.process.wait(60)
        self.reader.join(30)
        return status


@pytest.fixture
def before(only_supervisor: None) -> Iterator[set[Path]]:
    """Run directories that others left; after the test there are no more than these."""
    there = run_directories()
    yield there
    wait_until(lambda: run_directories() <= there, "the run directory's removal")


def test_it_asks_serves_restarts_and_leaves_nothing(before: set[Path]) -> None:
    up = Up(*SMALL, "--ask", "What is the capital of France?")
    try:
        url = up.url
        pids = up.pids()
        assert len(pids) == 4  # two instances, the router and the janitor
        assert len(run_directories() - before) == 1
        up.wait_for(r"its way: prefill-0 prefilled \d+ tokens in [\d.]+ ms")
        moved = up.wait_for(r"([\d,]+) bytes of KV went to decode-0: saved in [\d.]+ ms, loaded in [\d.]+ ms")
        assert int(moved[1].replace(",", "")) > 0
        assert "Paris" in up.text

        body = {"model": "smollm2-135m-instruct", "prompt": "One, two,", "max_tokens": 4, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()
        os.kill(up.pid_of("decode-0"), signal.SIGKILL)
        up.wait_for(r"^decode-0 ended \(killed by SIGKILL\); starting it again")
        again = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        while again.status_code == 503:
            again = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
        assert again.raise_for_status().json()["choices"] == answer["choices"]
        pids += up.pids()
    finally:
        status = up.end(signal.SIGINT)
    assert status == 0, up.text
    assert not any(is_running(pid) for pid in pids)


def test_nothing_remains_of_one_that_is_killed(before: set[Path]) -> None:
    up = Up(*SMALL, "--prefill", "0")
    try:
        assert httpx.get(f"{up.url}/ready", timeout=30).status_code == 200
        pids = up.pids()
        assert len(pids) == 3
    finally:
        assert up.end(signal.SIGKILL) == -signal.SIGKILL
    wait_until(lambda: not any(is_running(pid) for pid in pids), "the end of its children")


def test_a_port_in_use_is_one_line(before: set[Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        up = Up("--port", str(port))
        assert up.wait() == 2
    assert up.lines == [f"error: port {port} on 127.0.0.1 is in use; choose another with --port"]


def test_a_model_that_is_not_there_is_told_in_the_instances_words(before: set[Path]) -> None:
    up = Up(*SMALL, "--model", "/nonexistent/model.gguf")
    assert up.wait() == 2
    assert re.fullmatch(r"error: (prefill|decode)-0 could not start: .*/nonexistent/model\.gguf.*", up.lines[-1])
    assert "Traceback" not in up.text
    assert sum(line.startswith("error:") or "| error" in line for line in up.lines) == 1


def test_a_signal_while_it_starts_ends_it(before: set[Path]) -> None:
    up = Up(*SMALL)
    up.wait_for(r"^decode-0 starting")
    pids = up.pids()
    assert up.end(signal.SIGTERM) == 0
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("flag", ["--port", "--http-port"])
def test_an_instance_tells_a_port_in_use_in_one_line(role: str, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = {"--port": "0", "--http-port": "0", flag: str(port)}
        command = [sys.executable, "-m", f"pdserve.{role}.main", *(part for pair in ports.items() for part in pair)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert ended.stderr == f"error: port {port} on 127.0.0.1 is in use; choose another with {flag}\n"
