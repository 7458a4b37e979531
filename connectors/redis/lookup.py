"""What the server holds of a prompt: one round trip for all its blocks and ranks, on `AskedIndex`'s threads."""

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
        own = context.rank
        ranks = [own, *(rank for rank in own.all_ranks if rank != own)]
        self._names = [KeyNames(options.prefix, context.identity, rank) for rank in ranks]
        self._value_bytes = BlockFormat(context.identity, context.spec, own).value_bytes

    def count_stored_run(self, keys: Sequence[BlockKey]) -> int:
        """How many of ``keys`` have whole values, of all ranks, up to the first that has not.

        Raises:
            UnansweredError: the server cannot be reached, or refuses the question.
        """
        commands = [Command(b"STRLEN", names.of(key.digest)) for key in keys for names in self._names]
        try:
            with self._server.exchange() as exchange:
                replies = [channel.read_number() for channel in exchange.ask(commands)]
        except ExchangeError as error:
            raise UnansweredError(error.failure) from error
        num_ranks = len(self._names)
        for index in range(len(keys)):
            if not self._is_whole(replies[index * num_ranks : (index + 1) * num_ranks]):
                return index
        return len(keys)

    def close(self) -> None:
        """Close the connections."""
        self._server.close()

    def _is_whole(self, replies: Sequence[int | Failure]) -> bool:
        """Whether a block has all its shares: this rank's in its size, the others' in whatever size they have."""
        for reply in replies:
            if isinstance(reply, Failure) and reply.kind != "io":
                self._refuse(reply)
        # A key that holds no string is no value: the next save writes over it.
        own, *others = (0 if isinstance(reply, Failure) else reply for reply in replies)
        return own == self._value_bytes and all(others)

    def _refuse(self, failure: Failure) -> None:
        if failure.kind == "moved":
            self._server.note_move()
        raise UnansweredError(failure)
