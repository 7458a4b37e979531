"""The kit's own proof: honest connectors pass every check, and each broken one fails its rule and no other."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import broken_compositions
import broken_counters
import broken_directs
import broken_entries
import broken_stores
import layerwise_stores
import queue_directs
import ranked_connectors
import waking_stores
from broken_counters import CountingStore
from honest_direct import HonestDirect
from honest_store import HonestStore
from layerwise_stores import LayerwiseStore
from origins import remember_origins
from queue_directs import HonestQueue
from ranked_connectors import RankedDirect, RankedStore
from targets import CompositionTarget, DirectTarget, StoreTarget
from waking_stores import WakingStore

from pdserve.connectors.base import KVConnector
from pdserve.connectors.testing.check import Check, Level
from pdserve.connectors.testing.checks import get_checks
from pdserve.connectors.testing.machine import run_machine
from pdserve.connectors.testing.patience import Patience
from pdserve.connectors.testing.report import RuleVerdict, judge_rules
from pdserve.connectors.testing.runner import Verdict, run_checks
from pdserve.connectors.testing.target import ConformanceTarget
from pdserve.connectors.testing.violations import RuleViolationError

BROKEN: list[tuple[type[KVConnector], str]] = [
    *broken_stores.BROKEN,
    *broken_entries.BROKEN,
    *layerwise_stores.BROKEN,
    *broken_directs.BROKEN,
    *queue_directs.BROKEN,
    *waking_stores.BROKEN,
    *broken_compositions.BROKEN,
    *broken_counters.BROKEN,
    *ranked_connectors.BROKEN,
]


@pytest.fixture(autouse=True)
def origins() -> Iterator[None]:
    with remember_origins():
        yield


# Events in any order break several rules at once, and tokens are all the same to whose fault they are.
CHECKS = [check for check in get_checks(max_level=Level.FAULTS) if check.id != "any_order_of_events"]
ANY_ORDER = [check for check in get_checks() if check.id == "any_order_of_events"]
TWO_ENGINES = [check for check in get_checks() if check.id == "two_engines_answer_as_one"]


def build_target(connector: type[KVConnector], directory: Path) -> ConformanceTarget:
    if issubclass(connector, broken_compositions.Composition):
        return CompositionTarget(connector, {}, directory)
    target = (StoreTarget if issubclass(connector, HonestStore) else DirectTarget)(connector, {}, directory)
    if issubclass(getattr(connector, "scheduler_type", object), broken_stores.OwnIdentity):
        target.blocks = None  # its entries have names of its own
    return target


def judge(connector: type[KVConnector], directory: Path, checks: Sequence[Check] = CHECKS) -> list[RuleVerdict]:
    target = build_target(connector, directory)
    results = run_checks(target, checks, patience=Patience(1.0))
    target.close()
    return judge_rules(results)


def get_failures(verdicts: list[RuleVerdict]) -> dict[str, tuple[str, ...]]:
    return {v.rule.id: v.reasons for v in verdicts if v.verdict is Verdict.FAIL}


@pytest.mark.parametrize("connector", [HonestStore, HonestDirect, *broken_compositions.HONEST])
def test_an_honest_connector_passes_in_any_order_and_between_engines(
    connector: type[KVConnector], tmp_path: Path
) -> None:
    verdicts = judge(connector, tmp_path, [*ANY_ORDER, *TWO_ENGINES])
    tested = {v.rule.id: v.verdict for v in verdicts if v.verdict is not Verdict.NOT_TESTED}
    assert tested == {"R2": Verdict.PASS, "R9": Verdict.PASS}


@pytest.mark.parametrize(
    "connector",
    [
        CountingStore,
        LayerwiseStore,
        WakingStore,
        RankedStore,
        HonestDirect,
        HonestQueue,
        RankedDirect,
        *broken_compositions.HONEST,
        broken_compositions.RankedComposition,
    ],
)
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


FOUND_IN_ANY_ORDER = {
    "ReturnsTotals",
    "IgnoresHoles",
    "SavesTheFirstChunkOnly",
    "ForgetsAbortedLoads",
    "ReportsLoadsTwice",
    "SentBeforeFetched",
}


@pytest.mark.parametrize(
    "connector", [c for c, _ in BROKEN if c.__name__ in FOUND_IN_ANY_ORDER], ids=lambda connector: connector.__name__
)
def test_events_in_any_order_find_it(connector: type[KVConnector], tmp_path: Path) -> None:
    target = build_target(connector, tmp_path)
    with pytest.raises(RuleViolationError, match="after: "):
        run_machine(target, Patience(0.5), num_examples=200, num_steps=30, shrinks=False)
    target.close()


def test_two_engines_notice_kv_that_is_wrong(tmp_path: Path) -> None:
    (connector,) = (c for c, _ in BROKEN if c.__name__ == "SavesBeforeTheForwardPass")
    assert set(get_failures(judge(connector, tmp_path, TWO_ENGINES))) == {"R2"}
