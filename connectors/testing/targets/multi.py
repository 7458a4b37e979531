"""A composition: two stores of files, unless option ``children`` names others; each part has a target of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar

from pdserve.connectors.base import ConnectorFeatures, KVConnector
from pdserve.connectors.multi.children import Child, compose_features, parse_children
from pdserve.connectors.testing.faults.link import Damage
from pdserve.connectors.testing.target import ConformanceTarget, StoredBlocks, open_target
from pdserve.kv_layout import BlockKey, Rank
from pdserve.protocol import Role

_TWO_STORES = [{"connector": "shared_storage", "name": name} for name in ("first", "second")]


class StoredSeveralTimes:
    """All stores as one vandal sees them. A block is one entry to him: damaged in one store, lost in the others."""

    def __init__(self, stores: Sequence[StoredBlocks]) -> None:
        self._stores = stores

    def read(self, key: BlockKey) -> bytes | None:
        """The first entry that there is."""
        return next((data for store in self._stores if (data := store.read(key)) is not None), None)

    def write(self, key: BlockKey, data: bytes) -> None:
        """Replace the first entry that there is, and remove the others."""
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
    """The parts, and what can be done to all of them."""

    composes: ClassVar[bool] = True

    def __init__(self, connector: type[KVConnector], options: Mapping[str, Any], directory: Path) -> None:
        super().__init__(connector, options, directory)
        self._children = parse_children({"children": _TWO_STORES, **self.options})
        self.parts = [self._open_part(child) for child in self._children]
        self.crosses_processes = all(part.crosses_processes for part in self.parts)
        stores = [part.blocks for part in self.parts if part.blocks is not None]
        if len(stores) == len(self.parts):
            self.blocks = StoredSeveralTimes(stores)

    @property
    def features(self) -> ConnectorFeatures:
        """Those of the children, put together."""
        return compose_features(self._children)

    def build_options(self, engine_name: str, role: Role) -> dict[str, Any]:
        """Each child's own for this engine."""
        tables = [
            {"connector": child.connector_name, "name": child.name, "options": part.build_options(engine_name, role)}
            for child, part in zip(self._children, self.parts, strict=True)
        ]
        return {"children": tables}

    def set_lease(self, options: Mapping[str, Any], lease_s: float) -> dict[str, Any]:
        """Each part that has leases gets one of this length."""
        if not any(part.lease_option for part in self.parts):
            return super().set_lease(options, lease_s)
        tables = [
            {**table, "options": part.set_lease(table["options"], lease_s)} if part.lease_option else table
            for table, part in zip(options["children"], self.parts, strict=True)
        ]
        return {**options, "children": tables}

    def get_share(self, rank: Rank) -> StoredBlocks:
        """Of all parts, if each is a store that checks can get at."""
        return StoredSeveralTimes([part.get_share(rank) for part in self.parts])

    def is_saved(self, key: BlockKey) -> bool:
        """Each store writes in its own time."""
        return all(part.is_saved(key) for part in self.parts)

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """Nothing of any part can be reached."""
        with contextlib.ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.outage())
            yield

    @contextlib.contextmanager
    def full_medium(self) -> Iterator[None]:
        """Every store is full."""
        with contextlib.ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.full_medium())
            yield

    @contextlib.contextmanager
    def other_version(self) -> Iterator[None]:
        """Of every part."""
        with contextlib.ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.other_version())
            yield

    def held_loads(self) -> AbstractContextManager[None]:
        """Those of the preferred part."""
        return self.parts[0].held_loads()

    def bad_link(self, damage: Damage) -> AbstractContextManager[None]:
        """The preferred part's."""
        return self.parts[0].bad_link(damage)

    def close(self) -> None:
        """End what the parts started."""
        with contextlib.ExitStack() as stack:
            for part in self.parts:
                stack.callback(part.close)

    def _open_part(self, child: Child) -> ConformanceTarget:
        directory = self.directory / child.name
        directory.mkdir()
        return open_target(child.connector_name, directory, options=child.options)
