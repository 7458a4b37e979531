"""Directories that an engine has to itself: for files being written, and for LMCache's local disk tier."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from pdserve.connectors.lmcache.options import CONNECTOR_NAME, LMCacheOptions
from pdserve.errors import ConfigError

# Other programs may keep files in the directory too, and what they call temporary is theirs.
_TEMP_PREFIX = "pdserve-tmp-"
_STALE_TEMP_S = 600.0
_DISK_NAME = re.compile(r"pdserve-(\d+)-[0-9a-f]+")


class EngineDirectories:
    """Makes the directories, clears away what engines that died have left, and removes its own at the end.

    Args:
        options: of the connector.
        can_write: for transfers; lookups need none.

    Attributes:
        temp: where files are written before they are moved to their names, inside the shared directory; None = no
            files are shared, or none are written.
        disk: of the local disk tier; None = there is no such tier.

    Raises:
        ConfigError: a directory cannot be made.
    """

    def __init__(self, options: LMCacheOptions, *, can_write: bool) -> None:
        token = secrets.token_hex(6)
        self.temp: Path | None = None
        self.disk: Path | None = None
        if options.url.scheme == "fs":
            root = Path(options.url.location)
            _make(root)
            if can_write:
                _remove_stale_temps(root)
                self.temp = root / f"{_TEMP_PREFIX}{token}"
                _make(self.temp)
        if can_write and options.local_disk_path is not None:
            _make(options.local_disk_path)
            _remove_orphans(options.local_disk_path)
            self.disk = options.local_disk_path / f"pdserve-{os.getpid()}-{token}"
            _make(self.disk)

    def restore(self) -> None:
        """Make them again where somebody has emptied what they lie in. What they lie in is not made again."""
        for path in filter(None, (self.temp, self.disk)):
            with contextlib.suppress(OSError):
                path.mkdir(mode=0o700)

    def remove(self) -> None:
        """Remove both with what is in them; idempotent."""
        for path in filter(None, (self.temp, self.disk)):
            shutil.rmtree(path, ignore_errors=True)


def _make(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"connector {CONNECTOR_NAME}: cannot use directory {path}: {error.strerror}") from error


def _remove_stale_temps(root: Path) -> None:
    """Old unfinished files. Their directories stay: an idle engine's look the same, and it would miss its own."""
    oldest = time.time() - _STALE_TEMP_S
    for path in root.glob(f"{_TEMP_PREFIX}*/*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < oldest:
                path.unlink()


def _remove_orphans(root: Path) -> None:
    """Tiers of engines that are no more: nobody knows what is in them."""
    for path in _list_disks(root):
        shutil.rmtree(path, ignore_errors=True)


def _list_disks(root: Path) -> Iterator[Path]:
    for path in root.iterdir():
        match = _DISK_NAME.fullmatch(path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            yield path
