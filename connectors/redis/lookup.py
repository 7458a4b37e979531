"""What the server holds of a prompt: one round trip for all its blocks, on `AskedIndex`'s threads."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.connectors.base import ConnectorContext
from pdserve.connectors.blocks.asked_index import UnansweredError
from pdserve.connectors.blocks.block_format import BlockFormat
from pdserve.connectors.blocks.failures import Failure
from pdserve.connectors.redis.channel import Command
from pdserve.connectors.redis.keys import KeyNames
from pdserve.connectors.redis.options import RedisOptions
from pdserve.connectors.redis.server import ExchangeError, RedisServer
from pdserve.kv_layout import BlockKey


class RedisLookup:
    """Thread-safe.

    Args:
        server: of lookups alone; its timeout bounds a question.
        context: the engine.
        options: for the names.
    """

    def __init__(self, server: RedisServer, context: ConnectorContext, options: RedisOptions) -> None:
        self.place = server.place
        self._server = server
        self._names = KeyNames(options.prefix, context.identity)
        self._value_bytes = BlockFormat(context.identity, context.spec).value_bytes

    def count_stored_run(self, keys: Sequence[BlockKey]) -> int:
        """How many of ``keys`` have a whole value, up to the first that has not.

        Raises:
            UnansweredError: the server cannot be reached, or refuses the question.
        """
        try:
            with self._server.exchange([Command(b"STRLEN", self._names.of(key.digest)) for key in keys]) as channels:
                replies = [channel.read_number() for channel in channels]
        except ExchangeError as error:
            raise UnansweredError(error.failure) from error
        for index, reply in enumerate(replies):
            if isinstance(reply, Failure) and reply.kind != "io":
                self._refuse(reply)
            if reply != self._value_bytes:  # also a key that holds no string: the next save writes over it
                return index
        return len(replies)

    def close(self) -> None:
        """Close the connections."""
        self._server.close()

    def _refuse(self, failure: Failure) -> None:
        if failure.kind == "moved":
            self._server.note_move()
        raise UnansweredError(failure)
