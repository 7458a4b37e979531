"""Two at random, and the better one of them.

Several routers that all see the same reports would all choose the same least loaded instance; with two random
candidates they spread, and the worst queue is still short (Mitzenmacher, "The Power of Two Choices in Randomized
Load Balancing", 2001).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from pdserve.router.policies.base import C, Candidate, RoutedRequest, Score, estimate_work


class PowerOfTwo:
    """The one with less work of two random instances.

    Args:
        rng: where chance comes from.
    """

    uses_prefixes = False

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()

    def filter(self, candidates: Sequence[C], request: RoutedRequest) -> Sequence[C]:
        """Two of them, or all of fewer."""
        return candidates if len(candidates) <= 2 else self._rng.sample(candidates, 2)

    def score(self, candidate: Candidate, request: RoutedRequest) -> Score:
        """The work there."""
        return (estimate_work(candidate),)

    def note_choice(self, candidate: Candidate, request: RoutedRequest) -> None:
        """Nothing is remembered."""
