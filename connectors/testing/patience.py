"""How long a run of the kit waits for what should come at once."""

from __future__ import annotations

_SHARE_AFTER_HANG = 0.1


class Patience:
    """Full at first; a connector that has hung once is given a tenth from then on, so that a run ends.

    Args:
        timeout_s: the first wait's limit.
        call_timeout_s: the first limit of a single call, which may have to start something.
        has_hung: the connector has hung before.

    Attributes:
        full_timeout_s, full_call_timeout_s, has_hung: what it is made of.
    """

    def __init__(self, timeout_s: float = 10.0, call_timeout_s: float = 60.0, *, has_hung: bool = False) -> None:
        self.full_timeout_s = timeout_s
        self.full_call_timeout_s = call_timeout_s
        self.has_hung = has_hung

    @property
    def timeout_s(self) -> float:
        """The next wait's limit."""
        return self.full_timeout_s * self._share

    @property
    def call_timeout_s(self) -> float:
        """The next single call's limit."""
        return self.full_call_timeout_s * self._share

    def note_hang(self) -> None:
        """A wait was in vain."""
        self.has_hung = True

    @property
    def _share(self) -> float:
        return _SHARE_AFTER_HANG if self.has_hung else 1.0
