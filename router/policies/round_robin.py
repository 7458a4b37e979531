"""Everyone in turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from pdserve.router.policies.base import C, Candidate, RoutedRequest, Score

_MAX_REMEMBERED = 4096


class RoundRobin:
    """The instance whose last turn is longest ago; one that never had a turn goes first."""

    uses_prefixes = False

    def __init__(self) -> None:
        self._turn = 0
        self._last_turns: OrderedDict[str, int] = OrderedDict()

    def filter(self, candidates: Sequence[C], request: RoutedRequest) -> Sequence[C]:
        """All of them."""
        return candidates

    def score(self, candidate: Candidate, request: RoutedRequest) -> Score:
        """The number of its last turn."""
        return (self._last_turns.get(candidate.address, 0),)

    def note_choice(self, candidate: Candidate, request: RoutedRequest) -> None:
        """Move it to the end of the round; instances that left long ago are forgotten."""
        self._turn += 1
        self._last_turns[candidate.address] = self._turn
        self._last_turns.move_to_end(candidate.address)
        if len(self._last_turns) > _MAX_REMEMBERED:
            self._last_turns.popitem(last=False)
