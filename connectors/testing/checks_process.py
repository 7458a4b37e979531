"""Checks in a process of their own: a connector that crashes it, or hangs in native code, costs one check.

The process says now and then that no call lasts too long. When it is silent, or gone, the check that it was at has
failed; the next process goes on with the one after that.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pdserve.connectors.testing.check import Check
from pdserve.connectors.testing.checks_main import (
    STACKS_FILE,
    Alive,
    Assignment,
    Ended,
    Judged,
    Message,
    Refused,
    serve,
)
from pdserve.connectors.testing.faults.full_disk import release_mounts
from pdserve.connectors.testing.patience import Patience
from pdserve.connectors.testing.runner import CheckResult, Verdict
from pdserve.errors import ConfigError

_START_TIMEOUT_S = 120.0
_SILENT_CALLS = 1.5
"""A process that is silent for this many times a call's limit hangs: its own watch ends calls after one."""
_END_TIMEOUT_S = 60.0
_ABORT_TIMEOUT_S = 5.0
_KIT = str(Path(__file__).parent)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$', re.MULTILINE)


def run_checks_apart(
    connector: str,
    checks: Sequence[Check],
    directory: Path,
    *,
    options: dict[str, Any] | None = None,
    target: str | None = None,
    patience: Patience | None = None,
    on_result: Callable[[CheckResult], None] | None = None,
) -> tuple[list[CheckResult], str | None]:
    """Run checks one after the other, in as many processes as it takes.

    Args:
        connector: under test; like ``options`` and ``target`` as for `target.open_target`.
        checks: of the kit's, what to run.
        directory: an empty directory of the run's own.
        options: the connector's options.
        target: ``module:Class`` of a `ConformanceTarget`.
        patience: how long to wait for what should come at once.
        on_result: told of each end.

    Returns:
        How each check ended, and what was wrong when the last process ended, if anything.

    Raises:
        ConfigError: no engine can be started with the connector.
    """
    patience, results = patience or Patience(), list[CheckResult]()
    while True:
        rest = checks[len(results) :]
        own_directory = directory / str(len(results))  # a short name: unix sockets lie below it
        own_directory.mkdir()
        assignment = Assignment(
            connector,
            options,
            target,
            str(own_directory),
            [check.id for check in rest],
            not results,
            patience.full_timeout_s,
            patience.full_call_timeout_s,
            patience.has_hung,
        )
        with contextlib.closing(_ChecksProcess(assignment, patience)) as process:
            if not results:
                process.wait_until_ready()
            for check in rest:
                results.append(process.judge(check))
                if on_result is not None:
                    on_result(results[-1])
                if process.is_lost:
                    break
            if len(results) == len(checks):
                return results, None if process.is_lost else process.wait_for_end()


class _LostError(Exception):
    """The process hung or ended; the message completes "the connector …"."""


class _ChecksProcess:
    """One process, from its start to its end.

    Args:
        assignment: what it is to do.
        patience: of the run; it learns of hangs.

    Attributes:
        is_lost: it did not survive the last check.
    """

    def __init__(self, assignment: Assignment, patience: Patience) -> None:
        self.is_lost = False
        self._assignment = assignment
        self._patience = patience
        self._is_ready = self._has_ended = False
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=serve, args=(theirs, msgspec.msgpack.encode(assignment)))
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        """Wait until checks begin.

        Raises:
            ConfigError: they cannot.
        """
        connector = self._assignment.connector
        try:
            message = self._receive(_START_TIMEOUT_S)
        except _LostError as lost:
            raise ConfigError(f"no engine can be started with connector {connector}: it {lost}") from None
        if isinstance(message, Refused):
            raise ConfigError(message.reason)
        self._is_ready = True

    def judge(self, check: Check) -> CheckResult:
        """How the next check ends, which is this one."""
        began = time.monotonic()
        try:
            if not self._is_ready:
                self.wait_until_ready()
            judged = self._receive(_SILENT_CALLS * self._patience.call_timeout_s)
        except _LostError as lost:
            reason = f"the connector {lost}"
        except ConfigError as error:
            reason = error.message
        else:
            assert isinstance(judged, Judged)
            if judged.has_hung:
                self._patience.note_hang()
            return CheckResult(check, Verdict(judged.verdict), judged.reason, judged.broken_rule, judged.seconds)
        self.is_lost = True
        return CheckResult(check, Verdict.FAIL, f"{check.rule}: {reason}", check.rule, time.monotonic() - began)

    def wait_for_end(self) -> str | None:
        """Wait until the process has ended by itself; what was wrong with that."""
        try:
            ended = self._receive(_END_TIMEOUT_S)
        except _LostError as lost:
            return f"when all checks had ended, the connector {lost}"
        assert isinstance(ended, Ended)
        if ended.threads_left:
            return f"the connector left threads running: {', '.join(ended.threads_left)}"
        self._end(_END_TIMEOUT_S)
        return f"when all was closed, the connector {self._describe_end()}" if self._process.exitcode else None

    def close(self) -> None:
        """End the process with all that it started; idempotent."""
        self._end(0.0)
        self._pipe.close()
        release_mounts(Path(self._assignment.directory))

    def _receive(self, silence_s: float) -> Message:
        """The next message that tells something.

        Args:
            silence_s: the process has to say so often that it is alive.
        """
        while True:
            try:
                if not self._pipe.poll(silence_s):
                    raise self._abort(silence_s)
                message: Message = msgspec.msgpack.decode(self._pipe.recv_bytes(), type=Message)
            except (EOFError, ConnectionResetError):
                self._end(_ABORT_TIMEOUT_S)
                raise _LostError(self._describe_end()) from None
            if not isinstance(message, Alive):
                return message

    def _abort(self, silence_s: float) -> _LostError:
        """End a process that hangs; it still writes down where."""
        self._patience.note_hang()
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGABRT)
        self._end(_ABORT_TIMEOUT_S)
        place = self._find_place()
        where = f" from {place}" if place else ""
        return _LostError(f"did not return{where} within {silence_s:g} s; only the end of the process stopped it")

    def _describe_end(self) -> str:
        """How the process ended, by itself; completes "the connector …"."""
        exitcode, place = self._process.exitcode, self._find_place()
        assert exitcode is not None
        how = f"with status {exitcode}" if exitcode >= 0 else f"by {signal.Signals(-exitcode).name}"
        return f"ended the process {how}{f' in {place}' if place else ''}"

    def _find_place(self) -> str | None:
        """What the kit had called when the process ended, as that wrote it down; None = not known."""
        stacks = Path(self._assignment.directory) / STACKS_FILE
        text = stacks.read_text(errors="replace") if stacks.exists() else ""
        # The main thread's stack is the last one, its innermost frame the first.
        frames = _FRAME.finditer(text.rpartition("(most recent call first)")[2])
        called = list(itertools.takewhile(lambda frame: not frame["file"].startswith(_KIT), frames))
        return f"{called[-1]['function']} ({called[-1]['file']}, line {called[-1]['line']})" if called else None

    def _end(self, timeout_s: float) -> None:
        """Wait so long for the process, then end it, with all that it started: a group that it leads."""
        pid = self._process.pid
        if self._has_ended or pid is None:
            return
        multiprocessing.connection.wait([self._process.sentinel], timeout_s)
        # Before it is reaped, so that its id is still its own.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._has_ended = True
