"""How a pool chooses one of its usable instances: a policy scores each, the lowest score wins.

Adding a policy is one class here and its line in ``_POLICIES``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from pdserve.protocol import InstanceLoad

WAITING_WEIGHT = 4
"""A waiting request stands for a whole prefill, a running one for one row of each step."""

Score = tuple[int, ...]


class Candidate(Protocol):
    """What a policy may know of an instance."""

    @property
    def address(self) -> str:
        """Where it listens; unique in a pool."""
        ...

    @property
    def load(self) -> InstanceLoad:
        """Its latest report."""
        ...

    @property
    def num_unreported(self) -> int:
        """Legs that this router sent since that report."""
        ...


class Policy(Protocol):
    """Scores candidates and hears which was chosen. One object for each pool."""

    def score(self, candidate: Candidate) -> Score:
        """Lower is better; cheap and pure."""
        ...

    def note_choice(self, candidate: Candidate) -> None:
        """``candidate`` gets a leg."""
        ...


class RoundRobin:
    """The instance whose last turn is longest ago; one that never had a turn goes first."""

    def __init__(self) -> None:
        self._turn = 0
        self._last_turns: dict[str, int] = {}

    def score(self, candidate: Candidate) -> Score:
        """The number of its last turn."""
        return (self._last_turns.get(candidate.address, 0),)

    def note_choice(self, candidate: Candidate) -> None:
        """Move it to the end of the round."""
        self._turn += 1
        self._last_turns[candidate.address] = self._turn


class LeastLoaded:
    """The instance with the least work, 4 * waiting + running; equals take turns.

    What this router sent since the instance's last report counts as waiting there.
    """

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def score(self, candidate: Candidate) -> Score:
        """The work there, then the turn."""
        load = candidate.load
        work = WAITING_WEIGHT * (load.num_waiting + candidate.num_unreported) + load.num_running
        return (work, *self._turns.score(candidate))

    def note_choice(self, candidate: Candidate) -> None:
        """Remember the turn."""
        self._turns.note_choice(candidate)


_POLICIES: dict[str, Callable[[], Policy]] = {"least_loaded": LeastLoaded, "round_robin": RoundRobin}
POLICY_NAMES = tuple(_POLICIES)

C = TypeVar("C", bound=Candidate)


def build_policy(name: str) -> Policy:
    """A fresh policy for one pool; ``name`` is one of ``POLICY_NAMES``."""
    return _POLICIES[name]()


def choose(policy: Policy, candidates: Sequence[C]) -> C | None:
    """The best of ``candidates``, the first of equals; None of an empty sequence."""
    if not candidates:
        return None
    best = min(candidates, key=policy.score)
    policy.note_choice(best)
    return best
