"""A server that a benchmark starts, waits for, measures and ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from pdserve import env
from pdserve.errors import ConfigError
from pdserve.supervisor.placement import can_pin

_POLL_S = 0.05
_END_TIMEOUT_S = 20.0
_NUM_LAST_LINES = 5


@dataclass(frozen=True)
class ServerPlan:
    """How a server is started.

    Attributes:
        name: what tables call it.
        command: the program and its arguments; empty for one that runs already.
        url: where it will answer, without /v1; None = it says so in a line that ``url_pattern`` finds.
        url_pattern: matches that line, the address in its first group.
        environment: changes to this process's environment.
        start_timeout_s: how long it may take to answer.
    """

    name: str
    command: Sequence[str]
    url: str | None = None
    url_pattern: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = 300.0


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers.

    Attributes:
        url: where, without /v1.
        start_s: from its start until it answered; None for one that ran already.
    """

    url: str
    start_s: float | None


@contextlib.contextmanager
def running(plan: ServerPlan, cores: Sequence[int] | None) -> Iterator[RunningServer]:
    """Start a server, hand it out once it answers, and end it with all of its processes.

    Args:
        plan: what to start.
        cores: the only cores it may use; None = all.

    Raises:
        ConfigError: it ended or did not answer in time; with its last lines.
    """
    if not plan.command:
        assert plan.url is not None
        yield RunningServer(plan.url, None)
        return
    pinned = ",".join(map(str, cores)) if cores and can_pin() else "-"
    with tempfile.NamedTemporaryFile("w+", prefix="pdserve-bench-", suffix=".log") as log:
        started_s = time.monotonic()
        # A session of its own: Ctrl-C in the terminal reaches the benchmark alone, which then ends the server.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pdserve.bench.servers.pinned", str(os.getpid()), pinned, *plan.command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=env.extended_environment(plan.environment),
        )
        try:
            url = _wait_until_it_answers(plan, process, Path(log.name), started_s)
            yield RunningServer(url, time.monotonic() - started_s)
        finally:
            _end(process)


def _wait_until_it_answers(plan: ServerPlan, process: subprocess.Popen[bytes], log: Path, started_s: float) -> str:
    with httpx.Client(trust_env=False, timeout=5.0) as client:
        while True:
            if (status := process.poll()) is not None:
                raise ConfigError(f"{plan.name} ended with status {status} before it answered:{_last_lines(log)}")
            if time.monotonic() - started_s > plan.start_timeout_s:
                raise ConfigError(f"{plan.name} did not answer within {plan.start_timeout_s:.0f} s:{_last_lines(log)}")
            url = plan.url or _find_url(plan, log)
            if url is not None:
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(f"{url}/v1/models").status_code == 200:
                        return url
            time.sleep(_POLL_S)


def _find_url(plan: ServerPlan, log: Path) -> str | None:
    assert plan.url_pattern is not None
    match = re.search(plan.url_pattern, log.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    return match[1] if match else None


def _last_lines(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return "".join(f"\n  {line}" for line in lines[-_NUM_LAST_LINES:]) or " it said nothing"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to end, then end by force what is left of its process group."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_END_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
