"""Looks at intervals whether every KV block is explained and every transfer ends, and tells when not.

It tells and counts; it never frees a block: a block that looks forgotten may still be written to by a transfer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_MAX_TOLD = 5


class BlockWatchdog:
    """Lives on the engine's thread.

    Args:
        check: gives what is wrong, in words.
        interval_s: how often it is asked.
        clock: monotonic seconds.
    """

    def __init__(
        self, check: Callable[[], list[str]], interval_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._check = check
        self._interval_s = interval_s
        self._clock = clock
        self._next_s = clock() + interval_s

    def get_wait_s(self) -> float:
        """Seconds until the next look."""
        return max(self._next_s - self._clock(), 0.0)

    def poll(self) -> None:
        """Look, if it is time."""
        if self._clock() < self._next_s:
            return
        self._next_s = self._clock() + self._interval_s
        mistakes = self._check()
        for mistake in mistakes[:_MAX_TOLD]:
            logger.error("KV blocks: %s", mistake)
        if len(mistakes) > _MAX_TOLD:
            logger.error("KV blocks: and %d more", len(mistakes) - _MAX_TOLD)
