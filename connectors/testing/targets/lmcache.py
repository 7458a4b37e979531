"""LMCache over files: a directory of the run's own."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from pdserve.connectors.base import KVConnector
from pdserve.connectors.lmcache.retrieval import Retrieval
from pdserve.connectors.testing.faults.full_disk import full_disk
from pdserve.connectors.testing.faults.other_version import other_block_format
from pdserve.connectors.testing.target import ConformanceTarget
from pdserve.kv_layout import BlockKey, Rank

_SMALL_MEMORY_BYTES = 320 << 10
_FORMAT_ENDING = "@uint8.data"


def quick_opening() -> AbstractContextManager[object]:
    """Inside, LMCache does not collect the process's garbage when it is opened, which is most of what that takes."""
    return mock.patch("lmcache.v1.cache_engine.gc", SimpleNamespace(collect=lambda: 0))


class StoredFiles:
    """One rank's shares in LMCache's files as a vandal sees them."""

    def __init__(self, root: Path, rank: Rank) -> None:
        self._root = root
        self._worker = f"@{rank.size}@{rank.index}"

    def read(self, key: BlockKey) -> bytes | None:
        """The file's content."""
        path = self._find(key)
        with contextlib.suppress(FileNotFoundError):
            return path.read_bytes() if path else None
        return None

    def write(self, key: BlockKey, data: bytes) -> None:
        """Overwrite the file, which is there."""
        self._get(key).write_bytes(data)

    def delete(self, key: BlockKey) -> None:
        """Remove the file."""
        self._get(key).unlink()

    def _get(self, key: BlockKey) -> Path:
        path = self._find(key)
        if path is None:
            raise FileNotFoundError(f"block {key.hex} is not stored")
        return path

    def _find(self, key: BlockKey) -> Path | None:
        return next(self._root.glob(f"*{self._worker}@{int.from_bytes(key.digest):x}{_FORMAT_ENDING}"), None)


class Target(ConformanceTarget):
    """The directory.

    Option ``url`` is set here. LMCache's memory is small, so that opening it is quick and a load has several parts;
    it is no cache, so that damage to the files is seen.
    """

    def __init__(self, connector: type[KVConnector], options: Mapping[str, Any], directory: Path) -> None:
        self._root = directory / "store"
        own_options = {"url": f"fs://{self._root}", "max_cpu_bytes": _SMALL_MEMORY_BYTES, "cpu_cache": False}
        super().__init__(connector, {**own_options, **options}, directory)
        self.blocks = self.get_share(Rank())
        self._open = contextlib.ExitStack()
        self._open.enter_context(quick_opening())

    def get_share(self, rank: Rank) -> StoredFiles:
        """By the rank's names."""
        return StoredFiles(self._root, rank)

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """The directory is gone, and back as it was afterwards."""
        away = self._root.with_name(f"{self._root.name}-away")
        self._root.rename(away)
        try:
            yield
        finally:
            away.rename(self._root)

    def full_medium(self) -> AbstractContextManager[None]:
        """Somebody else has filled the disk."""
        return full_disk(self._root)

    def other_version(self) -> AbstractContextManager[object]:
        """Blocks are sealed in another format."""
        return other_block_format()

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

    def close(self) -> None:
        """LMCache is as it was."""
        self._open.close()
