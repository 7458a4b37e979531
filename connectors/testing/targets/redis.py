"""Redis: a server of the run's own, unless option ``url`` names another."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import redis

from pdserve.connectors.base import KVConnector
from pdserve.connectors.blocks.failures import Failure
from pdserve.connectors.blocks.messages import BlockTransfer
from pdserve.connectors.redis.channel import Channel
from pdserve.connectors.redis.redis_store import RedisStore
from pdserve.connectors.testing.faults.link import Damage, FaultyLink
from pdserve.connectors.testing.faults.other_version import other_block_format
from pdserve.connectors.testing.target import ConformanceTarget
from pdserve.connectors.testing.targets.redis_process import RedisProcess
from pdserve.connectors.testing.violations import NotOfferedError
from pdserve.errors import ConfigError
from pdserve.kv_layout import BlockKey, Rank

# Waits end long before the kit's do, but not where a busy machine lets a thread wait: a lookup without an answer makes
# the checks of damaged entries see a load that was never tried. A few small blocks are several parts of a load.
_OPTIONS = {"timeout_s": 3.0, "lookup_timeout_s": 3.0, "max_batch_bytes": 4096}

_HOLD_TIMEOUT_S = 5.0


class StoredValues:
    """One rank's shares in the server as a vandal sees them: rank, if there are several, and digest end their names."""

    def __init__(self, client: redis.Redis, rank: Rank) -> None:
        self._client = client
        self._pattern = f"*:{rank.label}:" if rank.label else "*:"

    def read(self, key: BlockKey) -> bytes | None:
        """The value."""
        name = self._find(key)
        value: bytes | None = None if name is None else self._client.get(name)
        return value

    def write(self, key: BlockKey, data: bytes) -> None:
        """Replace the value."""
        self._client.set(self._find(key), data)

    def delete(self, key: BlockKey) -> None:
        """Remove the value."""
        self._client.delete(self._find(key))

    def _find(self, key: BlockKey) -> bytes | None:
        names: list[bytes] = self._client.keys(self._pattern + key.hex)
        return names[0] if names else None


class Target(ConformanceTarget):
    """The server; option ``url`` is set here, and waits are short.

    Raises:
        ConfigError: there is no redis-server to start, and no ``url``.
    """

    def __init__(self, connector: type[KVConnector], options: Mapping[str, Any], directory: Path) -> None:
        self._process: RedisProcess | None = None
        if "url" not in options:
            if not RedisProcess.is_installed():
                raise ConfigError("redis-server is not installed: apt-get install redis-server, or set option url")
            self._process = RedisProcess()
            self._process.start()
            self._client = redis.Redis(unix_socket_path=str(self._process.unix_path))
            self.blocks = self.get_share(Rank())
            self._link = FaultyLink(str(self._process.unix_path), str(self._process.directory / "link"))
            options = {"url": f"unix://{self._link.address}", **options}
        super().__init__(connector, {**_OPTIONS, **options}, directory)

    def get_share(self, rank: Rank) -> StoredValues:
        """By the rank's names."""
        self._own_process()
        return StoredValues(self._client, rank)

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """The server is deaf, and back as it was afterwards."""
        with self._own_process().stopped():
            yield

    @contextlib.contextmanager
    def bad_link(self, damage: Damage) -> Iterator[None]:
        """The connection to the server suffers."""
        self._own_process()
        with self._link.inflict(damage):
            yield

    @contextlib.contextmanager
    def full_medium(self) -> Iterator[None]:
        """The server has used up its memory and evicts nothing."""
        self._own_process()
        self._client.config_set("maxmemory", 1)
        try:
            yield
        finally:
            self._client.config_set("maxmemory", 0)

    def other_version(self) -> AbstractContextManager[object]:
        """Blocks are sealed in another format."""
        return other_block_format()

    @contextlib.contextmanager
    def held_loads(self) -> Iterator[None]:
        """Values that are there are not read before the end; one that is not fails when a part is held back."""
        gate, is_held = threading.Event(), threading.Event()
        read_block = RedisStore._read_block

        def read_held(
            store: RedisStore, channels: Sequence[Channel], block: BlockTransfer, memory: Any
        ) -> Failure | None:
            if self.blocks is not None and self.blocks.read(block.key) is not None:
                is_held.set()
                gate.wait()
            is_held.wait(_HOLD_TIMEOUT_S)
            return read_block(store, channels, block, memory)

        with mock.patch.object(RedisStore, "_read_block", read_held):
            try:
                yield
            finally:
                gate.set()

    def close(self) -> None:
        """End the server."""
        if self._process is not None:
            self._client.close()
            self._link.close()
            self._process.close()

    def _own_process(self) -> RedisProcess:
        if self._process is None:
            raise NotOfferedError("the server that option url names is not ours to break")
        return self._process
