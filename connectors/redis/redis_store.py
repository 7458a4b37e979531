"""Blocks as values, one for each: read straight into KV memory, written and looked for in bounded batches."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Generator, Iterator, Sequence

from pdserve.connectors.base import ConnectorContext
from pdserve.connectors.blocks.block_format import BlockFormat
from pdserve.connectors.blocks.block_memory import BlockMemory
from pdserve.connectors.blocks.failures import Failure, InvalidBlockError
from pdserve.connectors.blocks.messages import BlockTransfer
from pdserve.connectors.blocks.store import SealedBlock, WriteResult
from pdserve.connectors.redis.channel import Channel, Command
from pdserve.connectors.redis.keys import KeyNames
from pdserve.connectors.redis.options import CONNECTOR_NAME, RedisOptions
from pdserve.connectors.redis.reads import ValueReader
from pdserve.connectors.redis.server import ExchangeError, RedisServer
from pdserve.errors import ConfigError
from pdserve.kv_layout import BlockKey

logger = logging.getLogger(__name__)

# A load is read in one go; what the server is asked for at a time is bounded there.
_WHOLE_LOAD = sys.maxsize
_BROKEN_OFF = Failure("io", "reading it was broken off")


class RedisStore:
    """Used by reader and writer threads.

    Args:
        server: where the values are.
        context: the engine.
        options: TTL and bounds.
    """

    def __init__(self, server: RedisServer, context: ConnectorContext, options: RedisOptions) -> None:
        self._server = server
        self._is_cluster = options.cluster
        self._names = KeyNames(options.prefix, context.identity, context.rank)
        self._format = BlockFormat(context.identity, context.spec, context.rank)
        self._ttl = b"%d" % options.ttl_s if options.ttl_s else None
        self._reader = ValueReader(self._names, self._format, self._ttl)
        self.place = server.place
        self.blocks_per_read = _WHOLE_LOAD
        self.blocks_per_write = max(options.max_batch_bytes // self._format.value_bytes, 1)

    def check_access(self) -> None:
        """Ask one question, so that a wrong password is told at start.

        Raises:
            ConfigError: the server refuses this user.
        """
        failure: Failure | int
        try:
            with self._server.exchange() as exchange:
                failure = exchange.ask([Command(b"STRLEN", self._names.prefix)])[0].read_number()
        except ExchangeError as error:
            failure = error.failure
        if not isinstance(failure, Failure):
            return
        if failure.kind == "permission":
            raise ConfigError(
                f"connector {CONNECTOR_NAME}: {self.place} refuses: {failure.reason}; "
                "see options username and password_file, and PDSERVE_REDIS_PASSWORD"
            )
        logger.warning("%s cannot be used now: %s; prompts are computed until it can", self.place, failure.reason)

    def has(self, key: BlockKey) -> bool:
        """Not known without asking; `write` asks for many at once."""
        return False

    def read(self, blocks: Sequence[BlockTransfer], memory: BlockMemory) -> Generator[Failure | None]:
        """Ask ahead, and take the answers in order; what was used lives on for another TTL."""
        asked: list[list[Channel]] = []
        step = self._reader.num_ahead // 2
        try:
            with self._server.exchange() as exchange:
                for index, block in enumerate(blocks):
                    while len(asked) < min(index + 1 + step, len(blocks)):
                        more = blocks[len(asked) : len(asked) + step]
                        asked += self._reader.ask(exchange, more, len(asked))
                    yield self._read_block(asked[index], block, memory)
        except ExchangeError as error:
            yield error.failure

    def write(self, blocks: Sequence[SealedBlock]) -> list[WriteResult]:
        """Ask which are there, give those another TTL, and send the others."""
        results: dict[bytes, WriteResult] = {}
        try:
            there, missing = self._divide(blocks)
            results = {block.key.digest: WriteResult(was_there=True) for block in there}
            for block, failure in self._set(missing, there):
                results[block.key.digest] = WriteResult(failure)
        except ExchangeError as error:
            rest = WriteResult(error.failure)
            return [results.get(block.key.digest, rest) for block in blocks]
        return [results[block.key.digest] for block in blocks]

    def count_missing(self, keys: Sequence[BlockKey]) -> int:
        """How many of these are not there; all of them, if the server does not answer."""
        names = [self._names.of(key.digest) for key in keys]
        # One question for all, except in a cluster, where each key may lie on another node.
        groups = [[name] for name in names] if self._is_cluster else [names]
        questions = [Command(b"EXISTS", first, tuple(others)) for first, *others in groups]
        try:
            with self._server.exchange() as exchange:
                replies = [channel.read_number() for channel in exchange.ask(questions)]
        except ExchangeError:
            return len(keys)
        return len(keys) - sum(reply for reply in replies if not isinstance(reply, Failure))

    def close(self) -> None:
        """Close the connections."""
        self._server.close()

    def _divide(self, blocks: Sequence[SealedBlock]) -> tuple[list[SealedBlock], list[SealedBlock]]:
        """Those that are there whole, and the others, in one round trip."""
        questions = [Command(b"STRLEN", self._names.of(block.key.digest)) for block in blocks]
        with self._server.exchange() as exchange:
            # A key that holds no string, or a question that was refused: the write will tell.
            are_there = [channel.read_number() == self._format.value_bytes for channel in exchange.ask(questions)]
        there = [block for block, is_there in zip(blocks, are_there, strict=True) if is_there]
        return there, [block for block, is_there in zip(blocks, are_there, strict=True) if not is_there]

    def _set(
        self, missing: Sequence[SealedBlock], there: Sequence[SealedBlock]
    ) -> Iterator[tuple[SealedBlock, Failure | None]]:
        """Send ``missing``, one by one with what became of it; ``there`` lives on for another TTL."""
        expiry: tuple[bytes, ...] = ()
        renewals = []
        if self._ttl is not None:
            expiry = (b"EX", self._ttl)
            renewals = [Command(b"EXPIRE", self._names.of(block.key.digest), (self._ttl,)) for block in there]
        commands = [Command(b"SET", self._names.of(block.key.digest), (block.value, *expiry)) for block in missing]
        with self._server.exchange() as exchange:
            channels = exchange.ask([*renewals, *commands])
            for channel in channels[: len(renewals)]:
                channel.read_number()
            for channel, block in zip(channels[len(renewals) :], missing, strict=True):
                failure = channel.read_ok()
                if failure is not None and failure.kind == "moved":
                    self._server.note_move()
                yield block, failure

    def _read_block(self, channels: Sequence[Channel], block: BlockTransfer, memory: BlockMemory) -> Failure | None:
        failure: Failure | None = _BROKEN_OFF
        try:
            failure = self._reader.read(channels, block.key, memory.get_view(block.block_id))
        except InvalidBlockError as error:
            self._remove(block.digest)
            failure = Failure(error.kind, f"its value is {error.kind} and was removed")
        finally:
            if failure is not None:
                memory.wipe(block.block_id)
        return failure

    def _remove(self, digest: bytes) -> None:
        """A good value that another engine writes in this moment may be hit; that costs a miss."""
        command = Command(b"UNLINK", self._names.of(digest))
        with contextlib.suppress(ExchangeError), self._server.exchange() as exchange:
            exchange.ask([command])[0].read_number()
