"""A composition: files and memory, both of the run's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pdserve.connectors.base import ConnectorFeatures, KVConnector
from pdserve.connectors.testing.target import ConformanceTarget, StoredBlocks
from pdserve.connectors.testing.targets.memory import StoredValues
from pdserve.connectors.testing.targets.shared_storage import StoredFiles
from pdserve.kv_layout import BlockKey


class StoredEverywhere:
    """All stores as a vandal sees them. A block is one entry to him: damaged in one store, lost in the others."""

    def __init__(self, stores: Sequence[StoredBlocks]) -> None:
        self._stores = stores

    def read(self, key: BlockKey) -> bytes | None:
        """The first entry that there is."""
        return next((data for store in self._stores if (data := store.read(key)) is not None), None)

    def write(self, key: BlockKey, data: bytes) -> None:
        """Replace the first entry that there is, and remove the others."""
        having = [store for store in self._stores if store.read(key) is not None]
        for index, store in enumerate(having):
            if index == 0:
                store.write(key, data)
            else:
                store.delete(key)

    def delete(self, key: BlockKey) -> None:
        """Remove every entry."""
        for store in self._stores:
            if store.read(key) is not None:
                store.delete(key)


class Target(ConformanceTarget):
    """Option ``children`` is set here, unless it is given: then nothing can be damaged."""

    crosses_processes: ClassVar[bool] = False
    composes: ClassVar[bool] = True

    def __init__(self, connector: type[KVConnector], options: Mapping[str, Any], directory: Path) -> None:
        is_given = "children" in options
        values: dict[bytes, bytes] = {}
        root = directory / "store"
        children = [
            {"connector": "shared_storage", "options": {"path": str(root)}},
            {"connector": "memory", "options": {"store": values}},
        ]
        super().__init__(connector, {"children": children, **options}, directory)
        self._has_stores_only = not is_given
        if not is_given:
            self.blocks = StoredEverywhere([StoredFiles(root), StoredValues(values)])

    @property
    def features(self) -> ConnectorFeatures:
        """Both children are stores, so the composition is one."""
        return ConnectorFeatures(can_save=True, can_load=True, is_store=self._has_stores_only)
