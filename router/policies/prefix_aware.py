"""Where the prompt's prefix lies already, unless too much else is to do there.

What an instance has is known by block identity: exactly where it tells (cache events), else by what this router
sent there; see `pdserve.router.prefix_memory`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.router.policies.base import WAITING_WEIGHT, C, Candidate, RoutedRequest, Score, estimate_work
from pdserve.router.policies.round_robin import RoundRobin

_BLOCKS_OF_A_REQUEST = 32
"""So many reused blocks (512 tokens of 16) are worth one more waiting request in front."""


class PrefixAware:
    """The least of the work there less what the cache saves; equals take turns."""

    uses_prefixes = True

    def __init__(self) -> None:
        self._turns = RoundRobin()

    def filter(self, candidates: Sequence[C], request: RoutedRequest) -> Sequence[C]:
        """All of them."""
        return candidates

    def score(self, candidate: Candidate, request: RoutedRequest) -> Score:
        """Work less saved work; among equals the longest prefix, then the turn."""
        num_known = request.num_known_blocks(candidate)
        saved = WAITING_WEIGHT * num_known / _BLOCKS_OF_A_REQUEST
        return (estimate_work(candidate) - saved, -num_known, *self._turns.score(candidate, request))

    def note_choice(self, candidate: Candidate, request: RoutedRequest) -> None:
        """Remember the turn."""
        self._turns.note_choice(candidate, request)
