"""Memory: a dictionary of the run's own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pdserve.connectors.base import KVConnector
from pdserve.connectors.testing.faults.other_version import other_block_format
from pdserve.connectors.testing.target import ConformanceTarget
from pdserve.kv_layout import BlockKey


class StoredValues:
    """The dictionary as a vandal sees it."""

    def __init__(self, values: dict[bytes, bytes]) -> None:
        self._values = values

    def read(self, key: BlockKey) -> bytes | None:
        """The value."""
        return self._values.get(key.digest)

    def write(self, key: BlockKey, data: bytes) -> None:
        """Replace the value."""
        self._values[key.digest] = data

    def delete(self, key: BlockKey) -> None:
        """Remove the value."""
        del self._values[key.digest]


class Target(ConformanceTarget):
    """The dictionary; option ``store`` is set here."""

    crosses_processes = False

    def __init__(self, connector: type[KVConnector], options: Mapping[str, Any], directory: Path) -> None:
        store: dict[bytes, bytes] = {}
        super().__init__(connector, {"store": store, **options}, directory)
        self.blocks = StoredValues(self.options["store"])

    def other_version(self) -> AbstractContextManager[object]:
        """Blocks are sealed in another format."""
        return other_block_format()
