"""Targets of the in-process connectors: their medium as a vandal sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from broken_compositions import Composition
from honest_direct import Endpoint, Pull
from honest_store import MEDIA, Block, HonestStore, Medium, StoreWorker
from ranked_connectors import name_share

from pdserve.connectors.base import KVConnector
from pdserve.connectors.multi.children import Child
from pdserve.connectors.testing import ConformanceTarget, NotOfferedError
from pdserve.connectors.testing.faults.link import Damage
from pdserve.connectors.testing.targets import multi
from pdserve.kv_layout import BlockKey, Rank


class Entries:
    def __init__(self, medium: Medium, rank: Rank) -> None:
        self._medium = medium
        self._ending = name_share(rank)

    def read(self, key: BlockKey) -> bytes | None:
        return self._medium.entries.get(key.hex + self._ending)

    def write(self, key: BlockKey, data: bytes) -> None:
        self._medium.entries[key.hex + self._ending] = data

    def delete(self, key: BlockKey) -> None:
        del self._medium.entries[key.hex + self._ending]


class StoreTarget(ConformanceTarget):
    crosses_processes = False

    def __init__(self, connector: type[KVConnector], options: Mapping[str, Any], directory: Path) -> None:
        super().__init__(connector, {"medium": str(directory), **options}, directory)
        self._medium = MEDIA.setdefault(str(directory), Medium())
        self.blocks = Entries(self._medium, Rank())

    def get_share(self, rank: Rank) -> Entries:
        super().get_share(Rank())  # offered at all
        return Entries(self._medium, rank)

    @contextlib.contextmanager
    def held_loads(self) -> Iterator[None]:
        self._medium.is_held = True
        try:
            yield
        finally:
            self._medium.is_held = False

    @contextlib.contextmanager
    def other_version(self) -> Iterator[None]:
        """Payloads are the other way round, and a bit of the header says so."""

        def write_entry(worker: StoreWorker, block: Block, payload: bytes) -> None:
            entry = worker.seal(block, payload[::-1])
            worker.medium.entries.setdefault(block.name, entry[:2] + b"\1" + entry[3:])

        with mock.patch.object(StoreWorker, "write_entry", write_entry):
            yield

    def close(self) -> None:
        MEDIA.pop(str(self.directory), None)


class DirectTarget(ConformanceTarget):
    crosses_processes = False
    lease_option = "lease_s"

    @contextlib.contextmanager
    def bad_link(self, damage: Damage) -> Iterator[None]:
        if damage is not Damage.FLIP:
            raise NotOfferedError("bytes can only be flipped here")
        read = Endpoint.read

        def read_damaged(endpoint: Endpoint, pull: Pull, index: int) -> tuple[bytes, bytes] | None:
            found = read(endpoint, pull, index)
            return None if found is None else (bytes([found[0][0] ^ 4]) + found[0][1:], found[1])

        with mock.patch.object(Endpoint, "read", read_damaged):
            yield


class CompositionTarget(multi.Target):
    """A composition of honest connectors, each with its own medium."""

    def __init__(self, connector: type[Composition], options: Mapping[str, Any], directory: Path) -> None:
        children = [{"connector": kind, "name": f"child-{index}"} for index, kind in enumerate(connector.kinds)]
        super().__init__(connector, {"children": children, **options}, directory)

    def _open_part(self, child: Child) -> ConformanceTarget:
        target = StoreTarget if issubclass(child.connector, HonestStore) else DirectTarget
        return target(child.connector, child.options, self.directory / child.name)
