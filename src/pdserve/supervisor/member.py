"""One member of a deployment: a process, started again on its old ports when it dies.

Advances only when `poll` is called, always on the supervisor's main thread::

    STARTING ── ready file ──> READY ── it dies ──> WAITING ── delay over ──> STARTING
                                                       └── budget spent ──> GIVEN_UP
"""

from __future__ import annotations

import enum
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.errors import ConfigError
from pdserve.supervisor.process import ManagedProcess
from pdserve.supervisor.restarts import RestartBudget


class State(enum.Enum):
    """Where a member is in its life."""

    STARTING = enum.auto()
    READY = enum.auto()
    WAITING = enum.auto()
    GIVEN_UP = enum.auto()


@dataclass(frozen=True)
class Plan:
    """How a member is run.

    Attributes:
        name: what people read, for example ``prefill-0``.
        module: the module that runs as ``__main__``.
        build_arguments: its command line but for the ready file; gets what the ready file said at the last
            start, or None at the first, and asks for the same ports again.
        cores: the cores it is pinned to; None = all.
    """

    name: str
    module: str
    build_arguments: Callable[[Mapping[str, Any] | None], list[str]]
    cores: Sequence[int] | None = None


@dataclass(frozen=True)
class Surroundings:
    """What all members of a deployment share.

    Attributes:
        directory: where ready files go.
        log_level: what the processes log.
        show_line: gets their lines of output.
        announce: gets lines that tell of comings and goings.
        watch: told each process group that was started.
    """

    directory: Path
    log_level: str
    show_line: Callable[[str], None]
    announce: Callable[[str], None]
    watch: Callable[[int], None]


class Member:
    """A process of the deployment; starts with its construction."""

    def __init__(self, plan: Plan, surroundings: Surroundings) -> None:
        self.plan = plan
        self.note: Mapping[str, Any] | None = None
        """What the ready file said, once there was one."""
        self._surroundings = surroundings
        self._ready_file = surroundings.directory / f"{plan.name}.json"
        self._budget = RestartBudget()
        self._restart_at_s = 0.0
        self.state = State.STARTING
        surroundings.announce(f"{plan.name} starting")
        self._start()

    @property
    def pid(self) -> int:
        """Process id of the latest start."""
        return self.process.pid

    def poll(self) -> None:
        """Notice readiness or death, and start again when the time has come.

        Raises:
            ConfigError: it ended and has never been ready; says why.
        """
        now_s = time.monotonic()
        if self.state is State.WAITING and now_s >= self._restart_at_s:
            self._start()
        if self.state not in (State.STARTING, State.READY):
            return
        if self.process.poll_status() is not None:
            if self.note is None:
                raise ConfigError(f"{self.plan.name} could not start: {self.process.describe_end()}")
            self._schedule_restart(now_s)
        elif self.state is State.STARTING and self._ready_file.exists():
            self.note = json.loads(self._ready_file.read_text(encoding="utf-8"))
            self.state = State.READY
            self._surroundings.announce(f"{self.plan.name} ready in {now_s - self._started_s:.1f} s")

    def _start(self) -> None:
        self._ready_file.unlink(missing_ok=True)
        self._started_s = time.monotonic()
        self.process = ManagedProcess(
            self.plan.name,
            self.plan.module,
            [*self.plan.build_arguments(self.note), f"--ready-file={self._ready_file}"],
            cores=self.plan.cores,
            log_level=self._surroundings.log_level,
            show_line=self._surroundings.show_line,
        )
        self._surroundings.watch(self.process.pid)
        self.state = State.STARTING

    def _schedule_restart(self, now_s: float) -> None:
        end = f"{self.plan.name} ended ({self.process.describe_end()})"
        self.process.kill()
        delay_s = self._budget.next_delay_s(now_s)
        if delay_s is None:
            self.state = State.GIVEN_UP
            self._surroundings.announce(f"{end}; it ended too often and is given up")
        else:
            self.state = State.WAITING
            self._restart_at_s = now_s + delay_s
            self._surroundings.announce(f"{end}; starting it again in {delay_s:.2f} s")
