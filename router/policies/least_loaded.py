"""Where there is least to do."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.router.policies.base import C, Candidate, RoutedRequest, Score, estimate_work
from pdserve.router.policies.round_robin import RoundRobin


class LeastLoaded:
    """The instance with the least work, 4 * waiting + running; equals take turns."""

    uses_prefixes = False

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def filter(self, candidates: Sequence[C], request: RoutedRequest) -> Sequence[C]:
        """All of them."""
        return candidates

    def score(self, candidate: Candidate, request: RoutedRequest) -> Score:
        """The work there, then the turn."""
        return (estimate_work(candidate), *self._turns.score(candidate, request))

    def note_choice(self, candidate: Candidate, request: RoutedRequest) -> None:
        """Remember the turn."""
        self._turns.note_choice(candidate, request)
