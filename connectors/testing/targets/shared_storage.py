"""Shared storage: a directory of the run's own, and a small file system for the disk that is full."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from pdserve.connectors.base import KVConnector
from pdserve.connectors.blocks.failures import Failure
from pdserve.connectors.blocks.messages import BlockTransfer
from pdserve.connectors.shared_storage.file_store import FileStore
from pdserve.connectors.testing.target import ConformanceTarget
from pdserve.connectors.testing.violations import NotOfferedError
from pdserve.kv_layout import BlockKey

_SMALL_DISK = "size=64m,nr_inodes=100k"
_MOUNT_TIMEOUT_S = 10.0
_HOLD_TIMEOUT_S = 5.0


class StoredFiles:
    """The directory as a vandal sees it."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, key: BlockKey) -> bytes | None:
        """The file's content."""
        with contextlib.suppress(FileNotFoundError):
            return self._get_path(key).read_bytes()
        return None

    def write(self, key: BlockKey, data: bytes) -> None:
        """Overwrite the file."""
        self._get_path(key).write_bytes(data)

    def delete(self, key: BlockKey) -> None:
        """Remove the file."""
        self._get_path(key).unlink()

    def _get_path(self, key: BlockKey) -> Path:
        return self._root / key.hex[0] / key.hex[1] / f"{key.hex}.kv"


class Target(ConformanceTarget):
    """The directory; option ``path`` is set here."""

    def __init__(self, connector: type[KVConnector], options: Mapping[str, Any], directory: Path) -> None:
        super().__init__(connector, {"path": str(directory / "store"), **options}, directory)
        self._root = Path(self.options["path"])
        self._files = StoredFiles(self._root)
        self.blocks = self._files

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """The directory is gone, and back as it was afterwards."""
        away = self._root.with_name(f"{self._root.name}-away")
        self._root.rename(away)
        yield
        away.rename(self._root)

    @contextlib.contextmanager
    def full_medium(self) -> Iterator[None]:
        """A file system that somebody else has filled lies over the directory."""
        mount = ["mount", "-t", "tmpfs", "-o", _SMALL_DISK, "tmpfs", str(self._root)]
        if os.getuid() != 0 or _run(mount):
            raise NotOfferedError("mounting a small file system needs privileges")
        try:
            with (self._root / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
                while filler.write(bytes(1 << 20)):
                    pass
            yield
        finally:
            _run(["umount", "--lazy", str(self._root)])

    @contextlib.contextmanager
    def held_loads(self) -> Iterator[None]:
        """Files that are there are not read before the end; one that is gone is missed once another is held."""
        gate, is_held = threading.Event(), threading.Event()
        read_block = FileStore._read_block

        def read_held(store: FileStore, block: BlockTransfer, memory: Any) -> Failure | None:
            if self._files.read(block.key) is None:
                is_held.wait(_HOLD_TIMEOUT_S)
            else:
                is_held.set()
                gate.wait()
            return read_block(store, block, memory)

        with mock.patch.object(FileStore, "_read_block", read_held):
            try:
                yield
            finally:
                gate.set()


def _run(command: list[str]) -> int:
    return subprocess.run(command, check=False, capture_output=True, timeout=_MOUNT_TIMEOUT_S).returncode
