"""How long a run of the kit waits for what should come at once."""

from __future__ import annotations

_SHARE_AFTER_HANG = 0.1


class Patience:
    """Full at first; a connector that has hung once is given a tenth from then on, so that a run ends.

    Args:
        timeout_s: the first wait's limit.
    """

    def __init__(self, timeout_s: float = 10.0) -> None:
        self._timeout_s = timeout_s
        self._has_hung = False

    @property
    def timeout_s(self) -> float:
        """The next wait's limit."""
        return self._timeout_s * (_SHARE_AFTER_HANG if self._has_hung else 1.0)

    def note_hang(self) -> None:
        """A wait was in vain."""
        self._has_hung = True
