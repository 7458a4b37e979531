"""The server, or cluster, as one thing that answers commands: connections by key, failures by kind."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException
from redis.retry import Retry

from pdserve.connectors.blocks.failures import Failure
from pdserve.connectors.redis.channel import Channel, Command, ProtocolError
from pdserve.connectors.redis.options import RedisOptions


class ExchangeError(Exception):
    """An exchange ended before its last reply.

    Args:
        failure: why.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class RedisServer:
    """Any number of threads may exchange at once; each takes connections of its own from a pool.

    Nothing connects before the first exchange, and nothing is retried here: a later exchange finds a server that has
    come back.

    Args:
        options: where the server is, and who asks.
        timeout_s: longest time to connect, and for one exchange.
    """

    def __init__(self, options: RedisOptions, *, timeout_s: float) -> None:
        self.place = str(options.url)
        self._options = options
        self._timeout_s = timeout_s
        self._clock = time.monotonic
        self._lock = threading.Lock()
        self._client: redis.Redis | redis.RedisCluster | None = None

    @contextlib.contextmanager
    def exchange(self, commands: Sequence[Command]) -> Iterator[list[Channel]]:
        """Send all commands; for each, in order, the channel to read its reply from.

        Replies are read whole and in order inside the ``with`` block; who leaves before the end costs a connection.

        Raises:
            ExchangeError: the server cannot be reached, hung up, or did not answer in time; also from inside.
        """
        deadline = self._clock() + self._timeout_s
        channels: dict[int, Channel] = {}
        client: redis.Redis | redis.RedisCluster | None = None
        try:
            # Held to the end: redis-py closes connections, also those in use, when a client is not held any more.
            client = self._get_client()
            in_order = [self._queue(client, command, channels, deadline) for command in commands]
            for channel in channels.values():
                channel.flush()
            yield in_order
        except (redis.RedisError, RedisClusterException, OSError, ProtocolError) as error:
            if self._options.cluster:
                self.close()  # the next exchange asks where everything is now
            raise ExchangeError(_classify(error)) from error
        finally:
            is_current = client is self._client
            for channel in channels.values():
                channel.close(keeps_connection=is_current)

    def note_move(self) -> None:
        """A key lies elsewhere than was thought: the next exchange asks where everything is now."""
        self.close()

    def close(self) -> None:
        """Close all connections that no thread uses; who uses one closes it afterwards. Idempotent."""
        with self._lock:
            client, self._client = self._client, None
        if isinstance(client, redis.RedisCluster):
            for node in client.get_nodes():
                if node.redis_connection is not None:
                    node.redis_connection.connection_pool.disconnect(inuse_connections=False)
        elif client is not None:
            client.connection_pool.disconnect(inuse_connections=False)

    def _queue(
        self,
        client: redis.Redis | redis.RedisCluster,
        command: Command,
        channels: dict[int, Channel],
        deadline: float,
    ) -> Channel:
        pool = self._get_pool(client, command.key)
        channel = channels.get(id(pool))
        if channel is None:
            channel = channels[id(pool)] = Channel(pool, deadline, self._clock)
        channel.queue(command)
        return channel

    def _get_pool(self, client: redis.Redis | redis.RedisCluster, key: bytes) -> redis.ConnectionPool:
        if self._options.cluster:
            client = client.get_redis_connection(client.get_node_from_key(key))
        pool: redis.ConnectionPool = client.connection_pool
        return pool

    def _get_client(self) -> redis.Redis | redis.RedisCluster:
        with self._lock:
            if self._client is None:
                self._client = self._build_client()
            return self._client

    def _build_client(self) -> redis.Redis | redis.RedisCluster:
        address = self._options.url
        settings: dict[str, Any] = {
            "username": self._options.username,
            "password": self._options.password,
            "socket_timeout": self._timeout_s,
            "socket_connect_timeout": self._timeout_s,
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
        }
        if address.is_tls:
            settings |= {
                "ssl": True,
                "ssl_ca_certs": _to_text(self._options.tls_ca_file),
                "ssl_certfile": _to_text(self._options.tls_cert_file),
                "ssl_keyfile": _to_text(self._options.tls_key_file),
            }
        if self._options.cluster:
            return redis.RedisCluster(host=address.host, port=address.port, **settings)
        if address.unix_path:
            return redis.Redis(unix_socket_path=address.unix_path, db=address.db, **settings)
        return redis.Redis(host=address.host, port=address.port, db=address.db, **settings)


def _to_text(path: object | None) -> str | None:
    return None if path is None else str(path)


def _classify(error: Exception) -> Failure:
    if isinstance(error, (TimeoutError, redis.TimeoutError)):
        return Failure("timeout", "the server did not answer in time")
    if isinstance(error, (redis.AuthenticationError, redis.exceptions.NoPermissionError)):
        return Failure("permission", str(error))
    return Failure("unreachable", str(error) or type(error).__name__)
