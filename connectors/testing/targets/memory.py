"""Memory: a dictionary of the run's own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pdserve.connectors.base import KVConnector
from pdserve.connectors.memory import get_name
from pdserve.connectors.testing.faults.other_version import other_block_format
from pdserve.connectors.testing.target import ConformanceTarget
from pdserve.kv_layout import BlockKey, Rank


class StoredValues:
    """One rank's shares in the dictionary as a vandal sees them."""

    def __init__(self, values: dict[bytes, bytes], rank: Rank) -> None:
        self._values = values
        self._rank = rank

    def read(self, key: BlockKey) -> bytes | None:
        """The value."""
        return self._values.get(get_name(key.digest, self._rank))

    def write(self, key: BlockKey, data: bytes) -> None:
        """Replace the value."""
        self._values[get_name(key.digest, self._rank)] = data

    def delete(self, key: BlockKey) -> None:
        """Remove the value."""
        del self._values[get_name(key.digest, self._rank)]


class Target(ConformanceTarget):
    """The dictionary; option ``store`` is set here."""

    crosses_processes = False

    def __init__(self, connector: type[KVConnector], options: Mapping[str, Any], directory: Path) -> None:
        store: dict[bytes, bytes] = {}
        super().__init__(connector, {"store": store, **options}, directory)
        self.blocks = self.get_share(Rank())

    def get_share(self, rank: Rank) -> StoredValues:
        """By the rank's names."""
        return StoredValues(self.options["store"], rank)

    def other_version(self) -> AbstractContextManager[object]:
        """Blocks are sealed in another format."""
        return other_block_format()
