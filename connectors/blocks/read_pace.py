"""How fast reads go on beside the engine's forward pass.

Decode waits for memory most of the time, and a read takes of it what it can get; a core that they share it keeps to the
end of its turn, a tick of 4 ms on many machines. So beside a forward pass a reader takes short turns and a pause of
several times the turn after each: what a load costs decode is spread evenly over many steps, however long it is. On the
forward thread's own core each turn comes out of a step, and the pauses are longer. A load there still gets on many
times faster than computing its prompt would: reading a token's KV takes a hundredth of computing it, or less.

With nothing to compute there is no pause; who pauses when a forward pass ends pauses on for 11 ms at most.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pdserve.connectors.blocks.cores import get_core

# Short against a step, long against the switch to another thread and back.
_TURN_S = 0.0005
# Who takes longer did not read all the time: memory that is touched for the first time is mapped first, which happens
# once, and may take milliseconds.
_LONGEST_TURN_S = 0.001
_PAUSE_OF_TURN = 3.0
# A twelfth of the core.
_PAUSE_OF_TURN_ON_SHARED_CORE = 11.0
_NO_CORE = -1


class ReadPace:
    """Told of steps by the forward thread, of pieces by any number of reader threads.

    Args:
        get_busy_s: processor time of the calling thread: a piece that had to wait for its core took nothing meanwhile.
        get_core: the core that the calling thread runs on; -1 = unknown.

    Attributes:
        is_computing: a forward pass may be going on.
    """

    def __init__(
        self, get_busy_s: Callable[[], float] = time.thread_time, get_core: Callable[[], int] = get_core
    ) -> None:
        self._get_busy_s = get_busy_s
        self._get_core = get_core
        self.is_computing = False
        self._forward_core = _NO_CORE
        self._turn = _Turn()

    def begin_step(self) -> None:
        """A forward pass may begin."""
        self._forward_core = self._get_core()
        self.is_computing = True

    def end_step(self) -> None:
        """It is over."""
        self.is_computing = False

    def begin_piece(self) -> None:
        """A piece is about to be read."""
        self._turn.piece_began_s = self._get_busy_s() if self.is_computing else None

    def get_pause_s(self) -> float:
        """How long to wait between the last piece and the next; 0 while the turn goes on. To be asked once."""
        turn = self._turn
        began_s, turn.piece_began_s = turn.piece_began_s, None
        if not self.is_computing:
            turn.busy_s = 0.0
            return 0.0
        if began_s is not None:
            turn.busy_s += self._get_busy_s() - began_s
        if turn.busy_s < _TURN_S:
            return 0.0
        busy_s, turn.busy_s = turn.busy_s, 0.0
        shares_core = self._forward_core != _NO_CORE and self._get_core() == self._forward_core
        return min(busy_s, _LONGEST_TURN_S) * (_PAUSE_OF_TURN_ON_SHARED_CORE if shares_core else _PAUSE_OF_TURN)


class _Turn(threading.local):
    """Each thread's own.

    Attributes:
        busy_s: processor time of the turn's pieces so far.
        piece_began_s: processor time of the thread when the last piece began; None when it is counted, or need not be.
    """

    busy_s: float = 0.0
    piece_began_s: float | None = None
