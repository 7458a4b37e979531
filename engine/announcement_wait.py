"""How long a step is put off for hand-offs that are about to be announced.

A store's writes go on when a prompt's last step has ended, for some milliseconds. If the next step began at once, the
hand-off could be announced when that ends, perhaps half a second later, and the reader's second token with it. So the
engine looks after its transfers for a moment first: a small share of what such a step takes, which bounds what a store
that is slow, or hangs, can cost.
"""

from __future__ import annotations

from collections.abc import Callable

_SHARE = 0.05
_FADE = 0.5


class AnnouncementWait:
    """Lives on the engine's main thread.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._long_step_s = 0.0
        self._ends_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the next step may begin, announced or not."""
        return self._clock() >= self._ends_s

    def note_step(self, seconds: float) -> None:
        """A step that computed has ended, and a wait begins.

        The next step may take longer than this one: what counts is the longest of late.
        """
        self._long_step_s = max(seconds, self._long_step_s * _FADE)
        self._ends_s = self._clock() + self._long_step_s * _SHARE
