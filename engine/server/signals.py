"""SIGTERM and SIGINT: the first one asks, the second one insists."""

from __future__ import annotations

import os
import signal
from types import FrameType

from pdserve.engine.server.inbox import Drain, Inbox

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class DrainOnSignal:
    """Drains at the first signal and ends the process at the second.

    Before `serving` is set nobody would read the inbox: then the first signal already ends the process, by an
    exception, so that half-written files are removed.
    """

    def __init__(self, inbox: Inbox) -> None:
        self.serving = False
        self._inbox = inbox
        self._asked = False

    def install(self) -> None:
        """Take over the signals; call on the main thread."""
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if self._asked:
            os._exit(128 + number)
        self._asked = True
        if not self.serving:
            raise SystemExit(128 + number)
        self._inbox.put(Drain(signal.Signals(number).name))
