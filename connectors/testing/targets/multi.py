"""A composition of two stores of files, with directories of the run's own: both must be told, heard and survived."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from pdserve.connectors.base import ConnectorFeatures, KVConnector
from pdserve.connectors.shared_storage import SharedStorageConnector
from pdserve.connectors.testing.target import ConformanceTarget, StoredBlocks
from pdserve.connectors.testing.targets import shared_storage
from pdserve.connectors.testing.violations import NotOfferedError
from pdserve.kv_layout import BlockKey


class StoredTwice:
    """Both stores as a vandal sees them. A block is one entry to him: damaged in one store, lost in the other."""

    def __init__(self, stores: Sequence[StoredBlocks]) -> None:
        self._stores = stores

    def read(self, key: BlockKey) -> bytes | None:
        """The first entry that there is."""
        return next((data for store in self._stores if (data := store.read(key)) is not None), None)

    def write(self, key: BlockKey, data: bytes) -> None:
        """Replace the first entry that there is, and remove the other."""
        for index, store in enumerate(self._find(key)):
            if index == 0:
                store.write(key, data)
            else:
                store.delete(key)

    def delete(self, key: BlockKey) -> None:
        """Remove every entry."""
        for store in self._find(key):
            store.delete(key)

    def _find(self, key: BlockKey) -> list[StoredBlocks]:
        return [store for store in self._stores if store.read(key) is not None]


class Target(ConformanceTarget):
    """Option ``children`` is set here, unless it is given: then nothing can be damaged or cut off."""

    composes: ClassVar[bool] = True

    def __init__(self, connector: type[KVConnector], options: Mapping[str, Any], directory: Path) -> None:
        self._parts: list[shared_storage.Target] = []
        if "children" not in options:
            for name in ("first", "second"):
                (directory / name).mkdir()
                self._parts.append(shared_storage.Target(SharedStorageConnector, {}, directory / name))
            children = [
                {"connector": "shared_storage", "name": part.directory.name, "options": dict(part.options)}
                for part in self._parts
            ]
            options = {"children": children, **options}
            self.blocks = StoredTwice([part.blocks for part in self._parts if part.blocks is not None])
        super().__init__(connector, options, directory)

    @property
    def features(self) -> ConnectorFeatures:
        """Both children are stores, so the composition is one."""
        return ConnectorFeatures(can_save=True, can_load=True, is_store=bool(self._parts))

    def is_saved(self, key: BlockKey) -> bool:
        """Each store writes in its own time."""
        return all(part.is_saved(key) for part in self._parts)

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """Both directories are gone, and back as they were afterwards."""
        with contextlib.ExitStack() as stack:
            for part in self._get_own():
                stack.enter_context(part.outage())
            yield

    @contextlib.contextmanager
    def full_medium(self) -> Iterator[None]:
        """Both directories are full."""
        with contextlib.ExitStack() as stack:
            for part in self._get_own():
                stack.enter_context(part.full_medium())
            yield

    def held_loads(self) -> AbstractContextManager[None]:
        """Files that are there are not read before the end."""
        return self._get_own()[0].held_loads()

    def _get_own(self) -> list[shared_storage.Target]:
        if not self._parts:
            raise NotOfferedError("the children that option children names are not ours to break")
        return self._parts
