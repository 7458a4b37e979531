"""Events in any order: what no single check thought of."""

from __future__ import annotations

import importlib.util

from pdserve.connectors.testing.bench import Bench
from pdserve.connectors.testing.check import Level, check, collect_checks
from pdserve.connectors.testing.violations import NotOfferedError

_NUM_EXAMPLES, _NUM_STEPS = 20, 30


@check("R9", level=Level.FAULTS)
def any_order_of_events(bench: Bench) -> None:
    """Hand-offs, loads, aborts, preemptions, evictions, damage and restarts in any order, against a dictionary."""
    if importlib.util.find_spec("hypothesis") is None:
        raise NotOfferedError("hypothesis is not installed")
    from pdserve.connectors.testing.machine import run_machine

    run_machine(bench.target, bench.patience, num_examples=_NUM_EXAMPLES, num_steps=_NUM_STEPS)


CHECKS = collect_checks(globals())
