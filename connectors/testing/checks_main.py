"""The process that `checks_process` runs checks in: what it is told, what it says, and what it does.

Where Python is when the process is ended from outside, or crashes, stands in a file of its directory: `faulthandler`
writes it without the interpreter's help, so also when native code keeps the interpreter.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from pdserve.connectors.testing.checks import CHECKS
from pdserve.connectors.testing.patience import Patience
from pdserve.connectors.testing.runner import CheckResult, find_start_error, run_checks
from pdserve.connectors.testing.target import open_target
from pdserve.errors import ConfigError

STACKS_FILE = "stacks.txt"


class Assignment(msgspec.Struct, frozen=True):
    """What a process is to do.

    Attributes:
        connector: under test; a registered name, or ``module:Class``.
        options: of the connector; None = the target's.
        target: ``module:Class`` of a `ConformanceTarget`, or None.
        directory: an empty directory of this process's own.
        check_ids: what to run, in this order.
        tries_to_start: first find out whether an engine can be started at all.
        timeout_s, call_timeout_s, has_hung: the `Patience` to have.
    """

    connector: str
    options: dict[str, Any] | None
    target: str | None
    directory: str
    check_ids: list[str]
    tries_to_start: bool
    timeout_s: float
    call_timeout_s: float
    has_hung: bool


class Alive(msgspec.Struct, frozen=True, tag=True):
    """No call lasts too long; said now and then."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Checks begin: the first message."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """There is nothing to run checks on: the only message."""

    reason: str


class Judged(msgspec.Struct, frozen=True, tag=True):
    """How the next check ended; see `CheckResult`."""

    verdict: str
    reason: str
    broken_rule: str | None
    seconds: float
    has_hung: bool


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Everything was closed: the last message; ``threads_left`` keep a process from ending."""

    threads_left: list[str]


Message = Alive | Ready | Refused | Judged | Ended


def serve(pipe: Connection, assignment: bytes) -> None:
    """The process's main function; it leads a group of its own, so that it can be ended with all that it started."""
    os.setsid()
    given = msgspec.msgpack.decode(assignment, type=Assignment)
    tempfile.tempdir = given.directory  # whoever ends this process removes what it leaves
    lock = threading.Lock()

    def say(message: Message) -> None:
        with lock:
            pipe.send_bytes(msgspec.msgpack.encode(message))

    def say_alive() -> None:
        with contextlib.suppress(OSError):  # nobody listens any more: the next result finds out
            say(Alive())

    before = threading.enumerate()
    with (Path(given.directory) / STACKS_FILE).open("w") as stacks:
        faulthandler.enable(stacks)
        try:
            _run_all(given, say, say_alive)
        except ConfigError as error:
            say(Refused(error.message))
            return
        left = _find_threads_left(before)
        say(Ended(left))
        if left:
            os._exit(0)
        faulthandler.disable()


def _run_all(given: Assignment, say: Callable[[Message], None], say_alive: Callable[[], None]) -> None:
    """Raises `ConfigError` where nothing can be tested."""
    patience = Patience(given.timeout_s, given.call_timeout_s, has_hung=given.has_hung)
    target = open_target(given.connector, Path(given.directory), options=given.options, target=given.target)
    with closing(target):
        error = find_start_error(target, patience, on_alive=say_alive) if given.tries_to_start else None
        if error is not None:
            raise ConfigError(f"no engine can be started with connector {given.connector}: {error}")
        say(Ready())

        def tell(result: CheckResult) -> None:
            verdict, reason = result.verdict.value, result.reason
            say(Judged(verdict, reason, result.broken_rule, result.seconds, patience.has_hung))

        by_id = {check.id: check for check in CHECKS}
        checks = [by_id[check_id] for check_id in given.check_ids]
        run_checks(target, checks, patience=patience, on_result=tell, on_alive=say_alive)


def _find_threads_left(before: Sequence[threading.Thread]) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread not in before and not thread.daemon]
