"""The conformance kit: what any connector is tested with, and a verdict for each rule of the contract.

    rules.py       the rules, as data
    checks/        the tests of each rule; plain functions
    harness.py     an engine without a model that drives one connector step by step
    rank_workers.py   its worker halves where it has several ranks; wire.py is the way between the halves
    bench.py       several such engines: what a check works with
    target.py      what a connector brings along: its options, its store, ways to break it
    runner.py      runs checks; report.py makes verdicts of them; hang_watch.py ends calls that never return
    checks_process.py   the same in a process that may hang and crash; checks_main.py is what runs there
    counters.py    what connectors count
    suite.py       the pytest class; plugin.py its command-line options
    faults/        damage: between the halves, on the wire, to the peer
    engines/       real engines with a tiny model

Importing this package loads neither torch nor pytest: a pytest plugin is imported wherever the package is installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pdserve.connectors.testing.bench import Bench
    from pdserve.connectors.testing.check import Check, Level, Need
    from pdserve.connectors.testing.harness import EngineHarness
    from pdserve.connectors.testing.kv_content import KVContent, build_context
    from pdserve.connectors.testing.rules import RULES, Rule
    from pdserve.connectors.testing.runner import run_checks
    from pdserve.connectors.testing.suite import ConnectorConformanceSuite
    from pdserve.connectors.testing.target import ConformanceTarget, StoredBlocks
    from pdserve.connectors.testing.violations import NotOfferedError, RuleViolationError

_MODULE_OF = {
    "RULES": "rules",
    "Bench": "bench",
    "Check": "check",
    "ConformanceTarget": "target",
    "ConnectorConformanceSuite": "suite",
    "EngineHarness": "harness",
    "KVContent": "kv_content",
    "Level": "check",
    "Need": "check",
    "NotOfferedError": "violations",
    "Rule": "rules",
    "RuleViolationError": "violations",
    "StoredBlocks": "target",
    "build_context": "kv_content",
    "run_checks": "runner",
}

__all__ = [
    "RULES",
    "Bench",
    "Check",
    "ConformanceTarget",
    "ConnectorConformanceSuite",
    "EngineHarness",
    "KVContent",
    "Level",
    "Need",
    "NotOfferedError",
    "Rule",
    "RuleViolationError",
    "StoredBlocks",
    "build_context",
    "run_checks",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
