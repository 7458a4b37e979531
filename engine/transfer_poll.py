"""How often an idle engine looks after its transfers: often when they are new, seldom when they last."""

from __future__ import annotations

_MIN_S = 0.0002
_MAX_S = 0.0015
_SHARE = 0.25


def get_transfer_poll_s(waited_s: float) -> float:
    """The pause before the next look: a quarter of the time waited so far, within bounds."""
    return min(max(waited_s * _SHARE, _MIN_S), _MAX_S)
