"""One test of a rule: a plain function with what it tests and what it needs."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdserve.connectors.base import ConnectorFeatures

if TYPE_CHECKING:
    from pdserve.connectors.testing.bench import Bench


class Level(enum.IntEnum):
    """How much is real around the connector."""

    CONTRACT = 1
    """A scripted engine and CPU tensors."""
    FAULTS = 2
    """The same, with damage done to the store, the transport, the peer or the messages."""
    ENGINE = 3
    """Real engines with a tiny model; tokens are compared with those of one engine alone."""


class Need(enum.Enum):
    """What a connector must declare for a check to apply; the value completes "it does not …"."""

    SAVE = "save KV"
    LOAD = "load KV"
    STORE = "keep blocks in a store"
    HOLD = "hold blocks for a consumer"
    DIRECT = "hold blocks for a consumer, alone and without being a store"
    CANCEL = "give up blocks that it holds, when nobody will come for them"
    HEARS_OF_QUEUE = "hear of requests that wait for their turn"
    WAKES = "wake the engine"
    RANKS = "serve engines of several ranks"
    COMPOSE = "compose other connectors"

    def is_met(self, features: ConnectorFeatures, *, composes: bool) -> bool:
        """Whether a connector with these features declares it."""
        match self:
            case Need.SAVE:
                return features.can_save
            case Need.LOAD:
                return features.can_load
            case Need.STORE:
                return features.is_store
            case Need.HOLD:
                return features.can_save and features.can_load and not features.is_store
            case Need.DIRECT:
                return Need.HOLD.is_met(features, composes=composes) and not composes
            case Need.CANCEL:
                return features.cancels_sends
            case Need.HEARS_OF_QUEUE:
                return features.hears_of_queue
            case Need.WAKES:
                return features.wakes_engine
            case Need.RANKS:
                return features.ranks
            case Need.COMPOSE:
                return composes


TRANSFER = (Need.SAVE, Need.LOAD)


@dataclass(frozen=True, slots=True)
class Check:
    """One test.

    Attributes:
        id: unique; the function's name.
        rule: the rule it tests.
        level: how much is real.
        needs: what must be declared; otherwise it is skipped.
        purpose: one sentence, the function's docstring.
        function: the test itself; raises `RuleViolationError` on a breach.
    """

    id: str
    rule: str
    level: Level
    needs: tuple[Need, ...]
    purpose: str
    function: Callable[[Bench], None]

    def find_unmet_need(self, features: ConnectorFeatures, *, composes: bool) -> str | None:
        """Why the check does not apply, or None."""
        for need in self.needs:
            if not need.is_met(features, composes=composes):
                return f"the connector does not declare that it can {need.value}"
        return None


def check(
    rule: str, *, needs: Iterable[Need] = TRANSFER, level: Level = Level.CONTRACT
) -> Callable[[Callable[[Bench], None]], Check]:
    """Make a function into a `Check` of ``rule``."""

    def wrap(function: Callable[[Bench], None]) -> Check:
        purpose = (function.__doc__ or "").partition("\n")[0]
        return Check(function.__name__, rule, level, tuple(needs), purpose, function)

    return wrap


def collect_checks(module_variables: Mapping[str, Any]) -> tuple[Check, ...]:
    """The checks that a module defines, in order."""
    return tuple(value for value in module_variables.values() if isinstance(value, Check))
