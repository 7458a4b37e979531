"""KV through an SQLite database: an example of a connector in a package of its own."""

from pdserve_sqlite.connector import SqliteConnector

__all__ = ["SqliteConnector"]
