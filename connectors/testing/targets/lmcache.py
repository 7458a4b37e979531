"""LMCache over files: a directory of the run's own, and a small file system for the disk that is full."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from pdserve.connectors.base import KVConnector
from pdserve.connectors.lmcache.retrieval import Retrieval
from pdserve.connectors.testing.target import ConformanceTarget
from pdserve.connectors.testing.violations import NotOfferedError
from pdserve.kv_layout import BlockKey

_SMALL_DISK = "size=64m,nr_inodes=100k"
_SMALL_MEMORY_BYTES = 320 << 10
_MOUNT_TIMEOUT_S = 10.0
_FORMAT_ENDING = "@uint8.data"


class StoredFiles:
    """LMCache's files as a vandal sees them."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, key: BlockKey) -> bytes | None:
        """The file's content."""
        path = self._find(key)
        with contextlib.suppress(FileNotFoundError):
            return path.read_bytes() if path else None
        return None

    def write(self, key: BlockKey, data: bytes) -> None:
        """Overwrite the file, which is there."""
        path = self._get(key)
        if len(data) > path.stat().st_size:
            raise NotOfferedError("LMCache reads as much as a value has, so what lies behind it is no part of it")
        path.write_bytes(data)

    def delete(self, key: BlockKey) -> None:
        """Remove the file."""
        self._get(key).unlink()

    def _get(self, key: BlockKey) -> Path:
        path = self._find(key)
        if path is None:
            raise FileNotFoundError(f"block {key.hex} is not stored")
        return path

    def _find(self, key: BlockKey) -> Path | None:
        return next(self._root.glob(f"*@{int.from_bytes(key.digest):x}{_FORMAT_ENDING}"), None)


class Target(ConformanceTarget):
    """The directory.

    Option ``url`` is set here. LMCache's memory is small, so that opening it is quick and a load has several parts;
    it is no cache, so that damage to the files is seen.
    """

    def __init__(self, connector: type[KVConnector], options: Mapping[str, Any], directory: Path) -> None:
        self._root = directory / "store"
        own_options = {"url": f"fs://{self._root}", "max_cpu_bytes": _SMALL_MEMORY_BYTES, "cpu_cache": False}
        super().__init__(connector, {**own_options, **options}, directory)
        self.blocks = StoredFiles(self._root)
        # LMCache collects garbage whenever it is opened, and has most of a process's objects itself.
        gc.freeze()

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """The directory is gone, and back as it was afterwards."""
        away = self._root.with_name(f"{self._root.name}-away")
        self._root.rename(away)
        try:
            yield
        finally:
            away.rename(self._root)

    @contextlib.contextmanager
    def full_medium(self) -> Iterator[None]:
        """A file system that somebody else has filled lies over the directory."""
        names = [path.name for path in self._root.iterdir() if path.is_dir()]
        mount = ["mount", "-t", "tmpfs", "-o", _SMALL_DISK, "tmpfs", str(self._root)]
        if os.getuid() != 0 or _run(mount):
            raise NotOfferedError("mounting a small file system needs privileges")
        try:
            for name in names:
                (self._root / name).mkdir()
            with (self._root / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
                while filler.write(bytes(1 << 20)):
                    pass
            yield
        finally:
            _run(["umount", "--lazy", str(self._root)])

    @contextlib.contextmanager
    def held_loads(self) -> Iterator[None]:
        """Values that LMCache has are not taken before the end."""
        gate = threading.Event()
        put = Retrieval.put

        def put_held(retrieval: Retrieval, index: int, value: memoryview) -> None:
            gate.wait()
            put(retrieval, index, value)

        with mock.patch.object(Retrieval, "put", put_held):
            try:
                yield
            finally:
                gate.set()


def _run(command: Sequence[str]) -> int:
    return subprocess.run(command, check=False, capture_output=True, timeout=_MOUNT_TIMEOUT_S).returncode
