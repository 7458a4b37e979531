"""Directories in the cache that are built once, whole or not at all, whichever process comes first."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from pdserve import env
from pdserve.errors import ConfigError

_log = logging.getLogger(__name__)
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


def build_once(name: str, build: Callable[[Path], None], folder: str = "models") -> Path:
    """The cached directory ``name``, built by ``build`` if it is not there.

    ``build`` fills a directory of a unique temporary name under a file lock; a rename makes it visible. A process
    that dies half-way leaves only that temporary directory, which the next builder removes.

    Args:
        name: below ``folder``; it changes whenever the content would.
        build: writes the files into the directory it is given.
        folder: of the cache.

    Raises:
        ConfigError: the cache directory cannot be written or the disk is full. ``build``'s own errors pass.
    """
    root = env.get_cache_dir() / folder
    target = root / name
    if target.is_dir():
        return target
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{name}.lock", target):
            if not target.is_dir():
                _build(target, build)
    except OSError as error:
        raise ConfigError(_explain(error, root)) from error
    return target


def require_free_space(directory: Path, num_bytes: int) -> None:
    """Fail before anything is written where ``num_bytes`` do not fit.

    Raises:
        OSError: ENOSPC, with both figures.
    """
    free = shutil.disk_usage(directory).free
    if free < num_bytes:
        reason = f"{num_bytes / 1e6:.0f} MB are needed, {free / 1e6:.0f} MB are free"
        raise OSError(errno.ENOSPC, reason, str(directory))


@contextmanager
def _locked(path: Path, target: Path) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _log.info("another process is preparing %s; waiting for it", target)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _build(target: Path, build: Callable[[Path], None]) -> None:
    """Fill a temporary directory beside ``target`` and rename it; the caller holds the lock."""
    for left_over in target.parent.glob(f".{target.name}.*.tmp"):
        shutil.rmtree(left_over, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        build(temporary)
        for file in temporary.iterdir():
            _sync(file)
        temporary.chmod(0o755)
        temporary.rename(target)
        _sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _sync(path: Path) -> None:
    """Put a file's or directory's content on the disk, so that a rename never outlives what it names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _explain(error: OSError, root: Path) -> str:
    if error.errno in _FULL_DISK:
        return (
            f"the disk of {root} is full ({error.strerror}); free some space"
            " or set PDSERVE_CACHE_DIR to another directory"
        )
    return (
        f"{error.filename or root} cannot be written: {error.strerror or error};"
        " set PDSERVE_CACHE_DIR to another directory"
    )
