"""The whole test suite: every rule of the contract, and the damage that a database file can take."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pdserve_sqlite import SqliteConnector

from pdserve.connectors import BlockKey, KVConnector
from pdserve.connectors.testing import ConformanceTarget, ConnectorConformanceSuite


class StoredRows:
    """The table as a vandal sees it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, key: BlockKey) -> bytes | None:
        row = self._run("SELECT value FROM blocks WHERE key = ?", key.digest)
        return bytes(row[0]) if row else None

    def write(self, key: BlockKey, data: bytes) -> None:
        self._run("UPDATE blocks SET value = ? WHERE key = ?", data, key.digest)

    def delete(self, key: BlockKey) -> None:
        self._run("DELETE FROM blocks WHERE key = ?", key.digest)

    def _run(self, statement: str, *values: bytes) -> Any:
        with contextlib.closing(sqlite3.connect(self._path, isolation_level=None)) as connection:
            return connection.execute(statement, values).fetchone()


class SqliteTarget(ConformanceTarget):
    """A database of the run's own."""

    def __init__(self, connector: type[KVConnector], options: Mapping[str, Any], directory: Path) -> None:
        path = directory / "store" / "kv.db"
        path.parent.mkdir()
        super().__init__(connector, {"path": str(path), **options}, directory)
        self.blocks = StoredRows(path)

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """Somebody writes and does not come to an end: nobody else can."""
        with contextlib.closing(sqlite3.connect(self.options["path"], isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            yield
            connection.execute("ROLLBACK")


class TestSqlite(ConnectorConformanceSuite):
    connector = "pdserve_sqlite:SqliteConnector"

    @classmethod
    def build_target(cls, directory: Path) -> ConformanceTarget:
        return SqliteTarget(SqliteConnector, {}, directory)
