"""What a policy is, what it may know, and the choice itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, TypeVar

from pdserve.protocol import InstanceLoad

WAITING_WEIGHT = 4
"""A waiting request stands for a whole prefill, a running one for one row of each step."""

Score = tuple[float, ...]


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


def _nothing() -> list[bytes]:
    return []


def _knows_nothing(_: str, __: Sequence[bytes]) -> int:
    return 0


@dataclass
class RoutedRequest:
    """What a policy may know of a request.

    Attributes:
        num_prompt_tokens: of its prompt.
        session_id: the client's X-Session-Id; empty without one.
        hash_prompt: computes `digests`; called once, and only when a policy asks.
        count_known_blocks: how many leading blocks of some digests the instance at an address has.
    """

    num_prompt_tokens: int = 0
    session_id: str = ""
    hash_prompt: Callable[[], list[bytes]] = field(default=_nothing, repr=False)
    count_known_blocks: Callable[[str, Sequence[bytes]], int] = field(default=_knows_nothing, repr=False)

    @cached_property
    def digests(self) -> list[bytes]:
        """Identities of the prompt's full blocks."""
        return self.hash_prompt()

    @property
    def has_digests(self) -> bool:
        """Whether somebody asked for them."""
        return "digests" in self.__dict__

    def num_known_blocks(self, candidate: Candidate) -> int:
        """How many of the prompt's leading blocks the candidate's prefix cache has."""
        return self.count_known_blocks(candidate.address, self.digests)


C = TypeVar("C", bound=Candidate)


class Policy(Protocol):
    """Filters and scores candidates and hears which was chosen. One object for each pool; lives on the event loop.

    Attributes:
        uses_prefixes: whether it asks what instances have in their prefix caches.
    """

    uses_prefixes: bool

    def filter(self, candidates: Sequence[C], request: RoutedRequest) -> Sequence[C]:
        """Those that may be chosen, at least one."""
        ...

    def score(self, candidate: Candidate, request: RoutedRequest) -> Score:
        """Lower is better; cheap and pure."""
        ...

    def note_choice(self, candidate: Candidate, request: RoutedRequest) -> None:
        """``candidate`` gets a leg of the request."""
        ...


def choose(policy: Policy, candidates: Sequence[C], request: RoutedRequest) -> C | None:
    """The best of ``candidates``, the first of equals; None of an empty sequence."""
    if not candidates:
        return None
    best = min(policy.filter(candidates, request), key=lambda candidate: policy.score(candidate, request))
    policy.note_choice(best, request)
    return best


def estimate_work(candidate: Candidate) -> int:
    """4 * waiting + running; what this router sent since the instance's last report counts as waiting there."""
    load = candidate.load
    return WAITING_WEIGHT * (load.num_waiting + candidate.num_unreported) + load.num_running
