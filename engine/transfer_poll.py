"""How often an idle engine looks after its transfers: often when they are new, seldom when they last.

Connectors that can wake it are heard at once, and a look costs them: it takes the interpreter's lock from the threads
that move the bytes.
"""

from __future__ import annotations

_MIN_S = 0.001
_MAX_S = 0.004
_SHARE = 0.25


def get_transfer_poll_s(waited_s: float) -> float:
    """The pause before the next look: a quarter of the time waited so far, within bounds."""
    return min(max(waited_s * _SHARE, _MIN_S), _MAX_S)
