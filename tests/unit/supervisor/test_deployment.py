from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.supervisor.deployment import Deployment
from pdserve.supervisor.member import Plan, State, Surroundings
from pdserve.supervisor.run_directory import RunDirectory
from pdserve.supervisor.stop_request import StopRequest

DEADLINE_S = 60.0

CHILD = """
    import json, os, pathlib, signal, sys, time
    options = dict(item.removeprefix("--").partition("=")[::2] for item in sys.argv[1:])
    if "fail" in options:
        print("error: no such model: " + options["fail"], file=sys.stderr)
        sys.exit(2)
    if "stubborn" in options:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    print("hello from", options["name"])
    ready = pathlib.Path(options["ready-file"])
    ready.with_suffix(".new").write_text(json.dumps({"port": int(options["port"]) or 4711, "pid": os.getpid()}))
    ready.with_suffix(".new").replace(ready)
    while True:
        time.sleep(60)
"""


def wait_until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


class Bench:
    """A deployment of small children, and what it said."""

    def __init__(self, directory: Path, drain_timeout_s: float = 5.0) -> None:
        self.announced: list[str] = []
        self.shown: list[str] = []
        self.stop_request = StopRequest()
        surroundings = Surroundings(
            directory=directory,
            log_level="info",
            show_line=self.shown.append,
            announce=self.announced.append,
            watch=lambda _: None,
        )
        self.deployment = Deployment(surroundings, self.stop_request, drain_timeout_s)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "scripted_child.py").write_text(textwrap.dedent(CHILD))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    bench = Bench(tmp_path)
    yield bench
    bench.stop_request._handle(signal.SIGINT, None)
    bench.stop_request._handle(signal.SIGINT, None)
    bench.deployment.stop()


def plan(name: str, *arguments: str, cores: list[int] | None = None) -> Plan:
    def build_arguments(note) -> list[str]:
        return [f"--name={name}", f"--port={note['port'] if note else 0}", *arguments]

    return Plan(name, "scripted_child", build_arguments, cores)


def test_members_become_ready_and_end_the_latest_stage_first(bench: Bench) -> None:
    first = bench.deployment.start([plan("a"), plan("b")])
    (last,) = bench.deployment.start([plan("c")])
    assert [member.note["port"] for member in [*first, last]] == [4711] * 3
    assert {"a | hello from a", "b | hello from b", "c | hello from c"} <= set(bench.shown)
    pids = [member.pid for member in [*first, last]]
    bench.deployment.stop()
    assert not any(is_running(pid) for pid in pids)
    assert [line.split(" ready")[0] for line in bench.announced if " ready" in line][-1] == "c"


def test_a_member_that_cannot_start_is_told_in_its_own_words(bench: Bench) -> None:
    with pytest.raises(ConfigError, match=r"^b could not start: no such model: x$"):
        bench.deployment.start([plan("a"), plan("b", "--fail=x")])
    pids = [member.pid for member in bench.deployment.members]
    bench.deployment.stop()
    assert not any(is_running(pid) for pid in pids)
    assert not any("error:" in line for line in bench.shown)


def test_a_member_that_dies_is_started_again_on_its_port(bench: Bench) -> None:
    (member,) = bench.deployment.start([plan("a")])
    killed = member.pid
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: member.poll() or (member.state is State.READY and member.pid != killed))
    assert member.note["port"] == 4711
    assert "a ended (killed by SIGKILL); starting it again in 0.25 s" in bench.announced


def test_a_member_that_dies_too_often_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.supervisor.restarts._FIRST_DELAY_S", 0.0)
    (member,) = bench.deployment.start([plan("a")])
    for _ in range(6):
        wait_until(lambda: member.poll() or member.state in (State.READY, State.STARTING))
        os.kill(member.pid, signal.SIGKILL)
        wait_until(lambda: member.process.poll_status() is not None)
        member.poll()
    assert member.state is State.GIVEN_UP
    assert bench.announced[-1] == "a ended (killed by SIGKILL); it ended too often and is given up"


def test_who_does_not_end_in_time_is_killed(bench: Bench) -> None:
    bench.deployment._drain_timeout_s = -1.9
    (member,) = bench.deployment.start([plan("a", "--stubborn=1")])
    bench.deployment.stop()
    assert not is_running(member.pid)
    assert bench.announced[-1] == "a did not end in time and is killed"


def test_a_member_runs_on_its_cores(bench: Bench) -> None:
    core = min(os.sched_getaffinity(0))
    (member,) = bench.deployment.start([plan("a", cores=[core])])
    assert os.sched_getaffinity(member.pid) == {core}


SUPERVISOR = """
    import pathlib, sys, time
    from pdserve.supervisor.deployment import Deployment
    from pdserve.supervisor.member import Plan, Surroundings
    from pdserve.supervisor.run_directory import RunDirectory
    from pdserve.supervisor.stop_request import StopRequest
    run = RunDirectory(0.5)
    surroundings = Surroundings(run.path, "info", lambda _: None, lambda _: None, run.watch)
    deployment = Deployment(surroundings, StopRequest(), 5.0)
    arguments = [["--name=polite", "--port=0"], ["--name=stubborn", "--port=0", "--stubborn=1"]]
    plans = [Plan(a[0][7:], "scripted_child", lambda _, a=a: a) for a in arguments]
    members = deployment.start(plans)
    print(run.path, *(member.pid for member in members), run._janitor.pid, flush=True)
    time.sleep(60)
"""


def test_nothing_remains_when_the_supervisor_is_killed(bench: Bench) -> None:
    supervisor = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SUPERVISOR)], stdout=subprocess.PIPE, text=True
    )
    with supervisor:
        assert supervisor.stdout is not None
        directory, *pids = supervisor.stdout.readline().split()
        assert Path(directory).is_dir()
        assert all(is_running(int(pid)) for pid in pids)
        supervisor.kill()
    wait_until(lambda: not any(is_running(int(pid)) for pid in pids))
    assert not Path(directory).exists()


def test_a_run_directory_is_gone_after_close() -> None:
    run_directory = RunDirectory(0.5)
    (run_directory.path / "kv").mkdir()
    assert run_directory.path.is_dir()
    run_directory.close()
    run_directory.close()
    assert not run_directory.path.exists()
