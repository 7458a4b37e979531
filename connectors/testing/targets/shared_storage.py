"""Shared storage: a directory of the run's own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

from pdserve.connectors.base import KVConnector
from pdserve.connectors.blocks.failures import Failure
from pdserve.connectors.blocks.messages import BlockTransfer
from pdserve.connectors.shared_storage.file_store import FileStore
from pdserve.connectors.testing.faults.full_disk import full_disk
from pdserve.connectors.testing.faults.other_version import other_block_format
from pdserve.connectors.testing.target import ConformanceTarget
from pdserve.kv_layout import BlockKey, Rank

_HOLD_TIMEOUT_S = 5.0


class StoredFiles:
    """One rank's shares in the directory as a vandal sees them."""

    def __init__(self, root: Path, rank: Rank) -> None:
        self._root = root
        self._ending = f".{rank.label}.kv" if rank.label else ".kv"

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
        return self._root / key.hex[0] / key.hex[1] / f"{key.hex}{self._ending}"


class Target(ConformanceTarget):
    """The directory; option ``path`` is set here."""

    def __init__(self, connector: type[KVConnector], options: Mapping[str, Any], directory: Path) -> None:
        super().__init__(connector, {"path": str(directory / "store"), **options}, directory)
        self._root = Path(self.options["path"])
        self._files = self.get_share(Rank())
        self.blocks = self._files

    def get_share(self, rank: Rank) -> StoredFiles:
        """By the rank's names."""
        return StoredFiles(self._root, rank)

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """The directory is gone, and back as it was afterwards."""
        away = self._root.with_name(f"{self._root.name}-away")
        self._root.rename(away)
        yield
        away.rename(self._root)

    def full_medium(self) -> AbstractContextManager[None]:
        """Somebody else has filled the disk."""
        return full_disk(self._root)

    def other_version(self) -> AbstractContextManager[object]:
        """Blocks are sealed in another format."""
        return other_block_format()

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
