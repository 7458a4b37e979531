"""From results of checks to a verdict for each rule, as a table for people and as plain data for machines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.connectors.testing.rules import RULES, Rule
from pdserve.connectors.testing.runner import CheckResult, Verdict

_WIDTH = 100


@dataclass(frozen=True, slots=True)
class RuleVerdict:
    """How one rule ended.

    Attributes:
        rule: the rule.
        verdict: fail if any check saw it broken; pass if at least one passed; else why there is none.
        num_passed: checks that passed.
        reasons: of the verdict, each once; for a pass, of the checks that could not run.
    """

    rule: Rule
    verdict: Verdict
    num_passed: int
    reasons: tuple[str, ...]


def judge_rules(results: Sequence[CheckResult]) -> list[RuleVerdict]:
    """A verdict for each rule, in the rules' order."""
    return [_judge_rule(rule, results) for rule in RULES]


def has_failed(verdicts: Iterable[RuleVerdict]) -> bool:
    """Whether any rule was broken."""
    return any(verdict.verdict is Verdict.FAIL for verdict in verdicts)


def format_table(verdicts: Sequence[RuleVerdict]) -> str:
    """One line a rule, with the reasons below it."""
    lines = []
    for verdict in verdicts:
        passed = f"{verdict.num_passed} passed" if verdict.num_passed else ""
        line = f"{verdict.rule.id:<4} {verdict.rule.title:<36} {verdict.verdict.value:<13} {passed}"
        lines.append(line.rstrip())
        lines.extend(f"       {_shorten(reason)}" for reason in verdict.reasons)
    counts = {kind: sum(v.verdict is kind for v in verdicts) for kind in Verdict}
    lines.append(", ".join(f"{count} {kind.value}" for kind, count in counts.items() if count))
    return "\n".join(lines)


def build_report(connector: str, results: Sequence[CheckResult], verdicts: Sequence[RuleVerdict]) -> dict[str, Any]:
    """Everything as plain values, for JSON.

    Args:
        connector: its name.
        results: of all checks.
        verdicts: of all rules.
    """
    return {
        "connector": connector,
        "failed": has_failed(verdicts),
        "rules": [
            {
                "id": v.rule.id,
                "title": v.rule.title,
                "verdict": v.verdict.value,
                "num_passed": v.num_passed,
                "reasons": list(v.reasons),
            }
            for v in verdicts
        ],
        "checks": [
            {
                "id": r.check.id,
                "rule": r.check.rule,
                "level": r.check.level.value,
                "verdict": r.verdict.value,
                "reason": r.reason,
                "broken_rule": r.broken_rule,
                "seconds": round(r.seconds, 3),
            }
            for r in results
        ],
    }


def _judge_rule(rule: Rule, results: Sequence[CheckResult]) -> RuleVerdict:
    mine = [result for result in results if result.check.rule == rule.id]
    num_passed = sum(result.verdict is Verdict.PASS for result in mine)
    broken = [result for result in results if result.broken_rule == rule.id]
    if not mine and not broken:
        return RuleVerdict(rule, Verdict.NOT_TESTED, 0, ())
    if broken:
        reasons = [f"{result.check.id}: {result.reason}" for result in broken]
        return RuleVerdict(rule, Verdict.FAIL, num_passed, _unique(reasons))
    for verdict in (Verdict.WARNING, Verdict.STOPPED):
        if any(result.verdict is verdict for result in mine):
            reasons = [f"{result.check.id}: {result.reason}" for result in mine if result.verdict is verdict]
            return RuleVerdict(rule, verdict, num_passed, _unique(reasons))
    not_offered = [result.reason for result in mine if result.verdict is Verdict.NOT_OFFERED]
    if num_passed:
        return RuleVerdict(rule, Verdict.PASS, num_passed, _unique(not_offered))
    verdict = Verdict.NOT_OFFERED if not_offered else Verdict.NOT_DECLARED
    return RuleVerdict(rule, verdict, 0, _unique(result.reason for result in mine))


def _unique(reasons: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(reasons))


def _shorten(reason: str) -> str:
    line = " ".join(reason.split())
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 1]}…"
