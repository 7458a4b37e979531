"""How often a process that dies is started again."""

from __future__ import annotations

import collections

_MAX_RESTARTS = 5
_WINDOW_S = 60.0
_FIRST_DELAY_S = 0.25


class RestartBudget:
    """At most five restarts in a minute, each after twice the wait of the one before."""

    def __init__(self) -> None:
        self._deaths_s: collections.deque[float] = collections.deque()

    def next_delay_s(self, now_s: float) -> float | None:
        """A process died at ``now_s``: wait this long before starting it again; None = give up on it."""
        while self._deaths_s and self._deaths_s[0] <= now_s - _WINDOW_S:
            self._deaths_s.popleft()
        if len(self._deaths_s) >= _MAX_RESTARTS:
            return None
        self._deaths_s.append(now_s)
        return float(_FIRST_DELAY_S * 2 ** (len(self._deaths_s) - 1))
