"""How fast reads go on beside the engine's forward pass.

Decode waits for memory most of the time, and a read takes of it what it can get; a core that they share it keeps to the
end of its turn, a tick of 4 ms on many machines. Beside a forward pass each piece is therefore followed by a pause of
several times the piece, which ends the turn, and spreads what a long prompt's KV costs decode over more than one step.
With nothing to compute there is no pause.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_PAUSE_OF_PIECE = 3.0


class ReadPace:
    """Told of steps by the forward thread, of pieces by the transfer thread.

    Args:
        get_busy_s: processor time of the calling thread: a piece that had to wait for its core took nothing meanwhile.
    """

    def __init__(self, get_busy_s: Callable[[], float] = time.thread_time) -> None:
        self._get_busy_s = get_busy_s
        self._piece_began_s = 0.0
        self._is_computing = False

    def begin_step(self) -> None:
        """A forward pass may begin."""
        self._is_computing = True

    def end_step(self) -> None:
        """It is over."""
        self._is_computing = False

    def begin_piece(self) -> None:
        """A piece is about to be read."""
        self._piece_began_s = self._get_busy_s()

    def get_pause_s(self) -> float:
        """How long to wait after this piece."""
        if not self._is_computing:
            return 0.0
        return _PAUSE_OF_PIECE * (self._get_busy_s() - self._piece_began_s)
