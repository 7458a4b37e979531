"""Blocks as values, one for each: read straight into KV memory, written and looked for in bounded batches."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence

from pdserve.connectors.base import ConnectorContext
from pdserve.connectors.blocks.block_format import BlockFormat
from pdserve.connectors.blocks.block_memory import BlockMemory
from pdserve.connectors.blocks.failures import Backoff, Failure, InvalidBlockError
from pdserve.connectors.blocks.messages import BlockTransfer
from pdserve.connectors.blocks.store import SealedBlock, WriteResult
from pdserve.connectors.redis.channel import Channel, Command
from pdserve.connectors.redis.keys import KeyNames
from pdserve.connectors.redis.options import CONNECTOR_NAME, RedisOptions
from pdserve.connectors.redis.reads import ValueReader
from pdserve.connectors.redis.server import Exchange, ExchangeError, RedisServer
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
        self._saves = options.saves_as(context.role)
        self._names = KeyNames(options.prefix, context.identity, context.rank)
        self._format = BlockFormat(context.identity, context.spec, context.rank)
        self._ttl = b"%d" % options.ttl_s if options.ttl_s else None
        self._reader = ValueReader(self._names, self._format, self._ttl)
        self._backoff = Backoff(time.monotonic)
        # Whether a block of the step under way was there when it began.
        self._are_there: dict[bytes, bool] = {}
        self.place = server.place
        self.blocks_per_read = _WHOLE_LOAD
        self.blocks_per_write = max(options.max_batch_bytes // self._format.value_bytes, 1)

    def check_access(self) -> None:
        """Try every command about a key that nobody has, so that a wrong password or a missing right is told at start.

        Raises:
            ConfigError: the server refuses this user.
        """
        try:
            with self._server.exchange() as exchange:
                failures = [failure for failure in self._try_commands(exchange) if failure is not None]
        except ExchangeError as error:
            failures = [error.failure]
        if not failures:
            return
        failure = next((failure for failure in failures if failure.kind == "permission"), failures[0])
        if failure.kind == "permission":
            raise ConfigError(
                f"connector {CONNECTOR_NAME}: {self.place} refuses: {failure.reason}; "
                "see options username and password_file, and PDSERVE_REDIS_PASSWORD"
            )
        logger.warning("%s cannot be used now: %s; prompts are computed until it can", self.place, failure.reason)

    def prepare(self, keys: Sequence[BlockKey]) -> Callable[[], None]:
        """Ask which of these are there, for `has`, and for `write`, which asks for what it was not told."""
        self._are_there = are_there = {}

        def ask() -> None:
            with contextlib.suppress(ExchangeError):
                are_there.update(self._ask_for(keys))

        return ask

    def has(self, key: BlockKey) -> bool:
        """Whether it was there when the step began; it may have gone since, as at any time: `count_missing` tells."""
        return self._are_there.get(key.digest, False)

    def read(self, blocks: Sequence[BlockTransfer], memory: BlockMemory) -> Generator[Failure | None]:
        """Ask ahead, and take the answers in order; what was used lives on for another TTL.

        After a timeout there is a pause: loads that wait for their turn do not wait for the server one by one.
        """
        paused = self._backoff.get_reason()
        if paused is not None:
            yield Failure(paused, "the server has just kept another load waiting")
            return
        asked: list[list[Channel]] = []
        step = self._reader.num_ahead // 2
        try:
            with self._server.exchange() as exchange:
                for index, block in enumerate(blocks):
                    while len(asked) < min(index + 1 + step, len(blocks)):
                        more = blocks[len(asked) : len(asked) + step]
                        asked += self._reader.ask(exchange, more, len(asked))
                    failure = self._read_block(asked[index], block, memory)
                    if index == 0:
                        self._backoff.count_success()
                    yield failure
        except ExchangeError as error:
            if error.failure.kind == "timeout":
                self._backoff.count_failure(error.failure.kind)
            yield error.failure

    def write(self, blocks: Sequence[SealedBlock]) -> list[WriteResult]:
        """Send what is not there, after asking for those that `prepare` has not asked for."""
        are_there = {block.key.digest: self._are_there.get(block.key.digest) for block in blocks}
        unknown = [block.key for block in blocks if are_there[block.key.digest] is None]
        results: dict[bytes, WriteResult] = {}
        try:
            if unknown:
                are_there |= self._ask_for(unknown)
            results = {digest: WriteResult(was_there=True) for digest, is_there in are_there.items() if is_there}
            for block, failure in self._set([block for block in blocks if not are_there[block.key.digest]]):
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

    def _try_commands(self, exchange: Exchange) -> Iterator[Failure | None]:
        """What the server refuses of all that this engine needs."""
        name = self._names.prefix
        commands = [Command(b"STRLEN", name), Command(b"UNLINK", name)]
        if self._ttl is not None:
            commands.append(Command(b"EXPIRE", name, (self._ttl,)))
        values = [Command(b"GETRANGE", name, (b"0", b"0"))]
        if self._saves:
            commands.append(Command(b"EXISTS", name))
            values.append(Command(b"SET", name, (b"", b"XX")))  # which writes nothing where nothing is
        channels = exchange.ask([*commands, *values])
        for channel in channels[: len(commands)]:
            reply = channel.read_number()
            yield reply if isinstance(reply, Failure) else None
        for channel in channels[len(commands) :]:
            length = channel.read_value_length()
            if isinstance(length, Failure):
                yield None if length.kind == "missing" else length
            else:
                channel.end_value()

    def _ask_for(self, keys: Sequence[BlockKey]) -> dict[bytes, bool]:
        """Whether each is there whole, by digest, in one round trip; those that are live on for another TTL.

        Raises:
            ExchangeError: the server does not answer.
        """
        questions = []
        for name in (self._names.of(key.digest) for key in keys):
            questions.append(Command(b"STRLEN", name))
            if self._ttl is not None:
                questions.append(Command(b"EXPIRE", name, (self._ttl,)))
        with self._server.exchange() as exchange:
            replies = [channel.read_number() for channel in exchange.ask(questions)]
        # A key that holds no string, or a question that was refused: the write will tell.
        lengths = replies[:: len(questions) // len(keys)]
        return {key.digest: length == self._format.value_bytes for key, length in zip(keys, lengths, strict=True)}

    def _set(self, blocks: Sequence[SealedBlock]) -> Iterator[tuple[SealedBlock, Failure | None]]:
        """Send ``blocks``, one by one with what became of it."""
        expiry = () if self._ttl is None else (b"EX", self._ttl)
        commands = [Command(b"SET", self._names.of(block.key.digest), (block.value, *expiry)) for block in blocks]
        with self._server.exchange() as exchange:
            for channel, block in zip(exchange.ask(commands), blocks, strict=True):
                failure = channel.read_ok()
                if failure is not None and failure.kind == "moved":
                    self._server.note_move()
                yield block, failure

    def _read_block(self, channels: Sequence[Channel], block: BlockTransfer, memory: BlockMemory) -> Failure | None:
        failure: Failure | None = _BROKEN_OFF
        try:
            failure = self._reader.read(channels, block.key, memory.get_view(block.block_id))
            if failure is not None and failure.kind == "moved":
                self._server.note_move()
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
