"""Runs checks against a target and says how each ended."""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from pdserve.connectors.testing.bench import Bench
from pdserve.connectors.testing.check import Check
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
) -> list[CheckResult]:
    """Run checks one after the other.

    Args:
        target: the connector under test.
        checks: what to run.
        patience: how long to wait for what should come at once.
        on_result: told of each end.
    """
    results = []
    for result in _run_each(target, checks, patience or Patience()):
        results.append(result)
        if on_result is not None:
            on_result(result)
    return results


def _run_each(target: ConformanceTarget, checks: Iterable[Check], patience: Patience) -> Iterator[CheckResult]:
    for check in checks:
        yield run_check(target, check, patience)


def run_check(target: ConformanceTarget, check: Check, patience: Patience) -> CheckResult:
    """Run one check on a bench of its own; whatever the connector raises is a result, not an error."""
    unmet = check.find_unmet_need(target.features, composes=target.composes)
    if unmet is not None:
        return CheckResult(check, Verdict.NOT_DECLARED, unmet)
    bench = Bench(target, check.rule, patience)
    began = time.monotonic()
    try:
        verdict, reason, broken_rule = _judge(check, bench)
    finally:
        bench.close()
    return CheckResult(check, verdict, reason, broken_rule, time.monotonic() - began)


def _judge(check: Check, bench: Bench) -> tuple[Verdict, str, str | None]:
    try:
        check.function(bench)
        bench.settle()
    except NotOfferedError as missing:
        return Verdict.NOT_OFFERED, str(missing), None
    except NotDeclaredError as missing:
        return Verdict.NOT_DECLARED, str(missing), None
    except UndeclaredAbilityError as ability:
        return Verdict.WARNING, str(ability), None
    except RuleViolationError as violation:
        broken_rule = _find_broken_rule(violation, bench.target)
        verdict = Verdict.FAIL if broken_rule == check.rule else Verdict.STOPPED
        return verdict, str(violation), broken_rule
    except Exception as error:
        logger.debug("check %s: the connector raised", check.id, exc_info=True)
        return Verdict.FAIL, f"{check.rule}: the connector raised {type(error).__name__}: {error}", check.rule
    return Verdict.PASS, "", None


def _find_broken_rule(violation: RuleViolationError, target: ConformanceTarget) -> str:
    """Parts of a composition count their completions right by themselves: it is their sum that is wrong."""
    return "R17" if target.composes and violation.rule in ("R9", "R10") else violation.rule
