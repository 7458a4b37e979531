"""The server, or cluster, as one thing that answers commands: connections by key, failures by kind."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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


class Exchange:
    """One thread's questions, over a connection for each node and lane that is asked.

    Args:
        client: whose connections are used.
        timeout_s: longest time to an answer, from the last question on.
        clock: monotonic seconds.

    Attributes:
        client: as given; held to the end, for redis-py closes connections, also those in use, when a client is not
            held any more.
    """

    def __init__(self, client: redis.Redis | redis.RedisCluster, timeout_s: float, clock: Callable[[], float]) -> None:
        self.client = client
        self._timeout_s = timeout_s
        self._clock = clock
        self._channels: dict[tuple[int, int], Channel] = {}

    def ask(self, commands: Sequence[Command]) -> list[Channel]:
        """Send all commands; for each, in order, the channel to read its reply from.

        A channel's replies come in the order of its commands, also over several calls.

        Raises:
            redis.RedisError: a node cannot be reached, or refuses the user.
            OSError: a connection broke, or the time is over.
        """
        deadline = self._clock() + self._timeout_s
        in_order = [self._queue(command, deadline) for command in commands]
        for channel in self._channels.values():
            channel.deadline = deadline
            channel.flush()
        return in_order

    def close(self, *, keeps_connections: bool) -> None:
        """Give the connections back."""
        for channel in self._channels.values():
            channel.close(keeps_connection=keeps_connections)

    def _queue(self, command: Command, deadline: float) -> Channel:
        pool = self._get_pool(command.key)
        place = (id(pool), command.lane)
        channel = self._channels.get(place)
        if channel is None:
            channel = self._channels[place] = Channel(pool, deadline, self._clock)
        channel.queue(command)
        return channel

    def _get_pool(self, key: bytes) -> redis.ConnectionPool:
        client = self.client
        if isinstance(client, redis.RedisCluster):
            client = client.get_redis_connection(client.get_node_from_key(key))
        pool: redis.ConnectionPool = client.connection_pool
        return pool


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
    def exchange(self) -> Iterator[Exchange]:
        """Questions and their answers, all of them inside the ``with`` block.

        Who leaves before the last reply is read costs the connections that owe one.

        Raises:
            ExchangeError: the server cannot be reached, hung up, or did not answer in time; also from inside.
        """
        exchange: Exchange | None = None
        try:
            exchange = Exchange(self._get_client(), self._timeout_s, self._clock)
            yield exchange
        except (redis.RedisError, RedisClusterException, OSError, ProtocolError) as error:
            if self._options.cluster:
                self.close()  # the next exchange asks where everything is now
            raise ExchangeError(_classify(error)) from error
        finally:
            if exchange is not None:
                exchange.close(keeps_connections=exchange.client is self._client)

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
