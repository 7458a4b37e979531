"""KV through a Redis server (or Valkey), over TCP, TLS or a unix socket; one server or a cluster.

A store, like shared_storage, for engines that share no file system. The halves are those of `connectors.blocks`; here
is what a server adds:

    options.py      settings, secrets from the environment or a file
    server.py       connections by key, exchanges of many commands, back to life after failures
    channel.py      one connection during an exchange: commands out, replies in, before a deadline
    redis_store.py  reads and writes
    reads.py        values in pieces, asked for ahead, over several connections
    lookup.py       what the server holds, for `AskedIndex`

A server that is slow, full, restarting or gone costs a bounded wait and then nothing: prompts are computed. What is
tried again is tried by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pdserve.connectors.base import ConnectorContext, ConnectorFeatures
from pdserve.connectors.blocks.asked_index import AskedIndex
from pdserve.connectors.blocks.messages import StepMetadata
from pdserve.connectors.blocks.scheduler import StoreScheduler
from pdserve.connectors.messages import MessageTypes
from pdserve.connectors.redis.lookup import RedisLookup
from pdserve.connectors.redis.options import CONNECTOR_NAME, get_server_url, parse_options
from pdserve.connectors.redis.server import RedisServer

if TYPE_CHECKING:
    from pdserve.connectors.blocks.worker import StoreWorker

__all__ = ["RedisConnector"]


class RedisConnector:
    """Builds the two halves."""

    features: ClassVar[ConnectorFeatures] = ConnectorFeatures(
        can_save=True, can_load=True, is_store=True, wakes_engine=True, ranks=True
    )

    @classmethod
    def message_types(cls, options: Mapping[str, Any]) -> MessageTypes:
        """The same whatever the options: the worker halves say nothing of their own."""
        return MessageTypes(metadata=StepMetadata)

    @classmethod
    def get_server(cls, options: Mapping[str, Any]) -> str:
        """The server's URL with these options, for ``pdserve doctor``."""
        return get_server_url(options)

    @classmethod
    def build_scheduler(cls, context: ConnectorContext) -> StoreScheduler:
        """The scheduler half.

        Raises:
            ConfigError: an option is unknown or wrong.
        """
        options = parse_options(context)
        lookup = RedisLookup(RedisServer(options, timeout_s=options.lookup_timeout_s), context, options)
        index = AskedIndex(lookup, timeout_s=options.lookup_timeout_s)
        return StoreScheduler(CONNECTOR_NAME, context, index, saves=options.saves_as(context.role))

    @classmethod
    def build_worker(cls, context: ConnectorContext) -> StoreWorker:
        """The worker half.

        Raises:
            ConfigError: an option is unknown or wrong, or the server refuses this user. A server that does not
                answer is no error: it may come later.
        """
        # Imported here: the scheduler half may live in a process without torch.
        from pdserve.connectors.blocks.worker import StoreWorker
        from pdserve.connectors.redis.redis_store import RedisStore

        options = parse_options(context)
        store = RedisStore(RedisServer(options, timeout_s=options.timeout_s), context, options)
        store.check_access()
        # Half of a write is the server's work: writers bound to one core would share it with the server.
        return StoreWorker(CONNECTOR_NAME, context, options, store, places_writers=False)
