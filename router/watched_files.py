"""Files that are read again when they change, while the router runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.file_stamp import FileStamp, read_stamp

logger = logging.getLogger(__name__)

_POLL_S = 1.0


class WatchedFiles:
    """Files that belong together.

    Files that became wrong change nothing: what was loaded before stays, and one warning tells of each change.

    Args:
        paths: the files.
        load: reads all of them and puts what they hold to use; called at once, and on the event loop later.
        what: they hold, for the log.

    Raises:
        ConfigError: what ``load`` raises now.
    """

    def __init__(self, paths: Sequence[Path], load: Callable[[], None], what: str) -> None:
        self._paths = paths
        self._load = load
        self._what = what
        self._stamps = self._read_stamps()
        load()

    async def follow(self, poll_s: float = _POLL_S) -> None:
        """Load again after every change, until cancelled."""
        while True:
            await asyncio.sleep(poll_s)
            stamps = await asyncio.to_thread(self._read_stamps)
            if stamps != self._stamps:
                self._stamps = stamps
                self._load_again()

    def _load_again(self) -> None:
        try:
            self._load()
        except ConfigError as error:
            logger.warning("%s not read again, those from before stay valid: %s", self._what, error.message)
        else:
            logger.info("%s read again", self._what)

    def _read_stamps(self) -> list[FileStamp | None]:
        return [read_stamp(path) for path in self._paths]
