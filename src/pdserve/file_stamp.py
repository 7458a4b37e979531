"""Noticing that a file has changed."""

from __future__ import annotations

import contextlib
from pathlib import Path

FileStamp = tuple[int, int, int]


def read_stamp(path: Path) -> FileStamp | None:
    """What changes when the file is written or replaced; None while it is not there."""
    with contextlib.suppress(OSError):
        found = path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino
    return None
