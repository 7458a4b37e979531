"""The user's wish that everything ends: Ctrl-C, SIGTERM or a closed terminal; the second one is urgent."""

from __future__ import annotations

import signal
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopRequest:
    """Counts the signals that ask to stop."""

    def __init__(self) -> None:
        self._num_signals = 0

    def install(self) -> None:
        """Take over the signals; call on the main thread."""
        for number in _SIGNALS:
            # nohup has SIGHUP ignored: then a closed terminal is no wish to stop.
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)

    @property
    def is_set(self) -> bool:
        """Whether the user asked to stop."""
        return self._num_signals > 0

    @property
    def is_urgent(self) -> bool:
        """Whether the user asked again."""
        return self._num_signals > 1

    def _handle(self, number: int, _: FrameType | None) -> None:
        # Nothing that takes a lock: the interrupted code may hold it.
        self._num_signals += 1
