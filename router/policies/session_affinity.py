"""Requests of one session to one instance, by the client's X-Session-Id header.

Rendezvous hashing: every router, also after a restart, names the same instance without a table, and when an
instance comes or goes only its own sessions move (Thaler and Ravishankar, 1998).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from pdserve.router.policies.base import C, Candidate, RoutedRequest, Score
from pdserve.router.policies.least_loaded import LeastLoaded


class SessionAffinity:
    """The session's instance; requests without a session go where there is least to do."""

    uses_prefixes = False

    def __init__(self) -> None:
        self._otherwise = LeastLoaded()

    def filter(self, candidates: Sequence[C], request: RoutedRequest) -> Sequence[C]:
        """The one whose hash with the session is lowest; all without a session."""
        if not request.session_id:
            return candidates
        return [min(candidates, key=lambda candidate: _hash(request.session_id, candidate.address))]

    def score(self, candidate: Candidate, request: RoutedRequest) -> Score:
        """The work there, then the turn."""
        return self._otherwise.score(candidate, request)

    def note_choice(self, candidate: Candidate, request: RoutedRequest) -> None:
        """Remember the turn."""
        self._otherwise.note_choice(candidate, request)


def _hash(session_id: str, address: str) -> bytes:
    return hashlib.blake2b(f"{session_id}\0{address}".encode(), digest_size=16).digest()
