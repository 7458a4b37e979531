"""Announces an instance in Redis for as long as it serves; see `pdserve.announcements`."""

from __future__ import annotations

import contextlib
import logging
import threading
from types import TracebackType

from pdserve.announcements import TTL_S, Announcement, AnnouncementBoard, AnnouncementError

logger = logging.getLogger(__name__)


class Announcer:
    """A context manager: announces on a thread of its own, and withdraws at the end.

    Redis being away is told once and tried again: routers keep the instances that they have.

    Args:
        board: where; closed at the end.
        announcement: what.
        ttl_s: how long an announcement lives when it is not repeated.
    """

    def __init__(self, board: AnnouncementBoard, announcement: Announcement, ttl_s: float = TTL_S) -> None:
        self._board = board
        self._announcement = announcement
        self._ttl_s = ttl_s
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pdserve-announcer", daemon=True)

    def __enter__(self) -> Announcer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()
        with contextlib.suppress(AnnouncementError):  # else it is forgotten when its time is over
            self._board.withdraw(self._announcement)
        self._board.close()

    def _run(self) -> None:
        was_told = False
        while True:
            try:
                self._board.put(self._announcement, self._ttl_s)
                was_told = False
            except AnnouncementError as failure:
                if not was_told:
                    logger.warning("cannot announce this instance to routers, trying on: %s", failure)
                was_told = True
            if self._ending.wait(self._ttl_s / 3):
                return
