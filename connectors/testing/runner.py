"""Runs checks against a target and says how each ended."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pdserve.connectors.testing.bench import Bench
from pdserve.connectors.testing.check import Check
from pdserve.connectors.testing.hang_watch import HangError, ending_hangs
from pdserve.connectors.testing.patience import Patience
from pdserve.connectors.testing.target import ConformanceTarget
from pdserve.connectors.testing.violations import (
    NotDeclaredError,
    NotOfferedError,
    RuleViolationError,
    UndeclaredAbilityError,
)

logger = logging.getLogger(__name__)


class Verdict(enum.StrEnum):
    """How a check or a rule ended."""

    PASS = "pass"
    FAIL = "fail"
    NOT_DECLARED = "not declared"
    WARNING = "warning"
    """The connector does something that it does not declare."""
    NOT_OFFERED = "not offered"
    """The target has no way to do what the check needs."""
    NOT_TESTED = "not tested"
    """No check of the rule was among those that ran."""
    STOPPED = "stopped"
    """A breach of another rule came in between."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """How one check ended.

    Attributes:
        check: the check.
        verdict: of the check.
        reason: why, unless it passed.
        broken_rule: the rule that was broken, if one was; not always the one that the check tests.
        seconds: how long it took.
    """

    check: Check
    verdict: Verdict
    reason: str = ""
    broken_rule: str | None = None
    seconds: float = 0.0


def run_checks(
    target: ConformanceTarget,
    checks: Iterable[Check],
    *,
    patience: Patience | None = None,
    on_result: Callable[[CheckResult], None] | None = None,
    on_alive: Callable[[], None] | None = None,
) -> list[CheckResult]:
    """Run checks one after the other.

    Args:
        target: the connector under test.
        checks: what to run.
        patience: how long to wait for what should come at once.
        on_result: told of each end.
        on_alive: called now and then, on another thread, as long as no call hangs that cannot be ended.
    """
    patience, results = patience or Patience(), []
    for check in checks:
        results.append(run_check(target, check, patience, on_alive))
        if on_result is not None:
            on_result(results[-1])
    return results


def run_check(
    target: ConformanceTarget, check: Check, patience: Patience, on_alive: Callable[[], None] | None = None
) -> CheckResult:
    """Run one check on a bench of its own; whatever the connector raises is a result, not an error."""
    unmet = check.find_unmet_need(target.features, composes=target.composes)
    if unmet is not None:
        return CheckResult(check, Verdict.NOT_DECLARED, unmet)
    bench = Bench(target, check.rule, patience)
    began = time.monotonic()
    ends = [_judge(check.rule, bench, action, on_alive) for action in (lambda: _run(check, bench), bench.close)]
    # What a failed check leaves behind may not be closed well: its own end is the one to tell.
    verdict, reason, broken_rule = next((end for end in ends if end[0] is not Verdict.PASS), ends[0])
    return CheckResult(check, verdict, reason, broken_rule, time.monotonic() - began)


def find_start_error(
    target: ConformanceTarget, patience: Patience, on_alive: Callable[[], None] | None = None
) -> str | None:
    """Why no engine can be started with the connector, or None."""
    bench = Bench(target, "start", patience)
    verdict, reason, _ = _judge("start", bench, lambda: _start(bench), on_alive)
    _judge("start", bench, bench.close, on_alive)
    return None if verdict is Verdict.PASS else reason.removeprefix("start: ")


def _run(check: Check, bench: Bench) -> None:
    check.function(bench)
    bench.settle()


def _start(bench: Bench) -> None:
    bench.build_producer()
    bench.build_consumer()


def _judge(
    rule: str, bench: Bench, action: Callable[[], None], on_alive: Callable[[], None] | None
) -> tuple[Verdict, str, str | None]:
    try:
        with ending_hangs(bench.patience.call_timeout_s, on_alive):
            action()
    except NotOfferedError as missing:
        return Verdict.NOT_OFFERED, str(missing), None
    except NotDeclaredError as missing:
        return Verdict.NOT_DECLARED, str(missing), None
    except UndeclaredAbilityError as ability:
        return Verdict.WARNING, str(ability), None
    except RuleViolationError as violation:
        broken_rule = _find_broken_rule(violation, bench.target)
        verdict = Verdict.FAIL if broken_rule == rule else Verdict.STOPPED
        return verdict, str(violation), broken_rule
    except HangError as hang:
        bench.patience.note_hang()
        return Verdict.FAIL, f"{rule}: the connector {hang}", rule
    except (Exception, SystemExit) as error:
        logger.debug("the connector raised", exc_info=True)
        return Verdict.FAIL, f"{rule}: the connector raised {type(error).__name__}: {error}", rule
    return Verdict.PASS, "", None


def _find_broken_rule(violation: RuleViolationError, target: ConformanceTarget) -> str:
    """Parts of a composition count their completions right by themselves: it is their sum that is wrong."""
    return "R17" if target.composes and violation.rule in ("R9", "R10") else violation.rule
