"""The kit's own proof: honest connectors pass every check, and each broken one fails its rule and no other."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import broken_directs
import broken_stores
from honest_direct import HonestDirect
from honest_store import HonestStore
from origins import remember_origins
from targets import DirectTarget, StoreTarget

from pdserve.connectors.base import KVConnector
from pdserve.connectors.testing.check import Level
from pdserve.connectors.testing.checks import get_checks
from pdserve.connectors.testing.patience import Patience
from pdserve.connectors.testing.report import RuleVerdict, judge_rules
from pdserve.connectors.testing.runner import Verdict, run_checks

BROKEN: list[tuple[type[KVConnector], str]] = [*broken_stores.BROKEN, *broken_directs.BROKEN]


@pytest.fixture(autouse=True)
def origins() -> Iterator[None]:
    with remember_origins():
        yield


def judge(connector: type[KVConnector], directory: Path) -> list[RuleVerdict]:
    is_store = issubclass(connector, HonestStore)
    target = (StoreTarget if is_store else DirectTarget)(connector, {}, directory)
    if issubclass(getattr(connector, "scheduler_type", object), broken_stores.OwnIdentity):
        target.blocks = None  # its entries have names of its own
    results = run_checks(target, get_checks(max_level=Level.FAULTS), patience=Patience(1.0))
    target.close()
    return judge_rules(results)


def get_failures(verdicts: list[RuleVerdict]) -> dict[str, tuple[str, ...]]:
    return {v.rule.id: v.reasons for v in verdicts if v.verdict is Verdict.FAIL}


@pytest.mark.parametrize("connector", [HonestStore, HonestDirect])
def test_an_honest_connector_passes(connector: type[KVConnector], tmp_path: Path) -> None:
    verdicts = judge(connector, tmp_path)
    assert get_failures(verdicts) == {}
    assert {v.verdict for v in verdicts} <= {Verdict.PASS, Verdict.NOT_DECLARED}


@pytest.mark.parametrize(("connector", "rule"), BROKEN, ids=lambda value: getattr(value, "__name__", value))
def test_a_broken_connector_fails_its_rule_and_no_other(
    connector: type[KVConnector], rule: str, tmp_path: Path
) -> None:
    failures = get_failures(judge(connector, tmp_path))
    assert set(failures) == {rule}, failures


def test_there_are_enough_of_them() -> None:
    assert len(BROKEN) >= 25
    assert len({connector.__name__ for connector, _ in broken_stores.BROKEN}) == len(broken_stores.BROKEN)


def test_an_undeclared_ability_is_a_warning(tmp_path: Path) -> None:
    verdicts = judge(broken_stores.UndeclaredStore, tmp_path)
    assert get_failures(verdicts) == {}
    assert [v.rule.id for v in verdicts if v.verdict is Verdict.WARNING] == ["R2"]
