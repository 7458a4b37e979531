"""Blocks as rows of one table.

A row is one transaction, so it is there as a whole or not at all. Its checksum covers the bytes, the key they belong
to and the model: whatever else lies in a row's place is a miss.
"""

from __future__ import annotations

import contextlib
import hashlib
import sqlite3
from pathlib import Path

from pdserve.connectors import BlockKey, ConnectorContext

_DIGEST_BYTES = 16
_TIMEOUT_S = 0.25


class BlockTable:
    """One half's connection to the database; used by one thread.

    Args:
        path: the database file.
        context: whose blocks; engines of other models read and write other rows.
    """

    def __init__(self, path: Path, context: ConnectorContext) -> None:
        self._path = path
        self._fingerprint = context.identity.fingerprint.encode()
        self._block_bytes = context.spec.block_bytes
        self._connection: sqlite3.Connection | None = None

    def has(self, key: BlockKey) -> bool:
        """Whether a row of the right size is there."""
        with contextlib.suppress(sqlite3.Error):
            found = self._connect().execute("SELECT length(value) FROM blocks WHERE key = ?", (key.digest,)).fetchone()
            return found == (_DIGEST_BYTES + self._block_bytes,)
        return False

    def read(self, key: BlockKey) -> bytes | None:
        """The block's bytes; None when they are not there, or not what they should be (then the row goes)."""
        try:
            row = self._connect().execute("SELECT value FROM blocks WHERE key = ?", (key.digest,)).fetchone()
            if row is None:
                return None
            value = bytes(row[0])
            payload = value[_DIGEST_BYTES:]
            if len(payload) == self._block_bytes and value == self._seal(key, payload):
                return payload
            self._connect().execute("DELETE FROM blocks WHERE key = ?", (key.digest,))
        except sqlite3.Error:
            self._disconnect()
        return None

    def write(self, key: BlockKey, payload: bytes) -> bool:
        """Store a block, unless it is there; whether it is now."""
        try:
            row = (key.digest, self._seal(key, payload))
            self._connect().execute("INSERT OR IGNORE INTO blocks VALUES (?, ?)", row)
        except sqlite3.Error:
            self._disconnect()
            return False
        return True

    def close(self) -> None:
        """Let go of the file; idempotent."""
        self._disconnect()

    def _seal(self, key: BlockKey, payload: bytes) -> bytes:
        digest = hashlib.blake2b(payload, digest_size=_DIGEST_BYTES, key=key.digest, salt=self._fingerprint[:16])
        digest.update(key.num_tokens.to_bytes(4, "little"))
        return digest.digest() + payload

    def _connect(self) -> sqlite3.Connection:
        if self._connection is None:
            if not self._path.parent.is_dir():
                raise sqlite3.OperationalError(f"{self._path.parent} is gone")
            # Autocommit: each statement is a transaction. The write-ahead log lets readers go on beside a writer.
            connection = sqlite3.connect(self._path, timeout=_TIMEOUT_S, isolation_level=None)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("CREATE TABLE IF NOT EXISTS blocks (key BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID")
            self._connection = connection
        return self._connection

    def _disconnect(self) -> None:
        """After an error the next call begins anew: the database may be back by then."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
