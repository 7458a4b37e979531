"""All checks, in the order in which they run: what everything else builds on comes first."""

from __future__ import annotations

from pdserve.connectors.testing.check import Check, Level
from pdserve.connectors.testing.checks import (
    anything,
    closing,
    composition,
    counters,
    declared,
    engine,
    identity,
    integrity,
    leases,
    lifecycle,
    lookup,
    peers,
    ranks,
    saving,
    wake_ups,
)

CHECKS: tuple[Check, ...] = (
    *declared.CHECKS,
    *lookup.CHECKS,
    *saving.CHECKS,
    *lifecycle.CHECKS,
    *wake_ups.CHECKS,
    *identity.CHECKS,
    *ranks.CHECKS,
    *composition.CHECKS,
    *counters.CHECKS,
    *integrity.CHECKS,
    *leases.CHECKS,
    *peers.CHECKS,
    *closing.CHECKS,
    *anything.CHECKS,
    *engine.CHECKS,
)


def get_checks(*, max_level: Level = Level.ENGINE) -> tuple[Check, ...]:
    """The checks up to a level."""
    return tuple(check for check in CHECKS if check.level <= max_level)
