"""The list of instances that announce themselves in Redis."""

from __future__ import annotations

import time
from collections.abc import Callable

from pdserve.announcements import TTL_S, AnnouncementBoard, AnnouncementError
from pdserve.protocol import Role
from pdserve.router.membership.directory import DirectoryError, Members


class RedisDirectory:
    """One Redis server's list.

    An instance stays for ``hold_s`` after its announcement is gone: a server that was restarted empty must not empty
    the pools before the instances have announced themselves anew. Dead ones are noticed by their sessions anyway.

    Args:
        board: the announcements; closed at the end.
        hold_s: how long a missing one stays.
        clock: monotonic seconds.
    """

    def __init__(
        self, board: AnnouncementBoard, hold_s: float = TTL_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._board = board
        self._hold_s = hold_s
        self._clock = clock
        self._last_seen_s: dict[tuple[Role, str], float] = {}

    def read(self) -> Members:
        """Those announced now or a short while ago.

        Raises:
            DirectoryError: Redis cannot be asked.
        """
        try:
            announced = self._board.read()
        except AnnouncementError as error:
            raise DirectoryError(f"Redis: {error}") from None
        now_s = self._clock()
        self._last_seen_s |= {(one.role, one.address): now_s for one in announced}
        self._last_seen_s = {key: seen for key, seen in self._last_seen_s.items() if now_s - seen <= self._hold_s}
        return {role: sorted(address for r, address in self._last_seen_s if r is role) for role in Role}

    def close(self) -> None:
        """Release the connections; idempotent."""
        self._board.close()
