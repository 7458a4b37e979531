"""The prefill side of a hand-off: an engine without a model in this process, or in one of its own."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import msgspec

from pdserve.bench.transfers.engine import BareEngine, Chunks, HandOffError, Offered
from pdserve.bench.transfers.pool import BlockRing
from pdserve.connectors.base import ConnectorContext
from pdserve.connectors.registry import load_connector
from pdserve.engine.transfer_poll import get_transfer_poll_s
from pdserve.errors import ConfigError
from pdserve.kv_layout import ModelIdentity
from pdserve.protocol import KVTransferParams, Role

_START_TIMEOUT_S = 120.0
_REPLY_TIMEOUT_S = 90.0
_END_TIMEOUT_S = 20.0


class ProducerStart(msgspec.Struct, frozen=True):
    """What a producer is built from.

    Attributes:
        connector: its registered name.
        options: its options.
        engine_id: unique for each engine.
        identity: of the model.
        num_blocks: of the pool.
    """

    connector: str
    options: dict[str, Any]
    engine_id: str
    identity: ModelIdentity
    num_blocks: int

    def build(self) -> BareEngine:
        """The engine, its pool filled.

        Raises:
            ConfigError: the connector is unknown or refuses its options.
        """
        ring = BlockRing(self.identity.kv, self.num_blocks)
        ring.fill()
        context = ConnectorContext(self.engine_id, Role.PREFILL, self.identity, self.identity.kv, self.options)
        return BareEngine(load_connector(self.connector), context, ring)


class _Order(msgspec.Struct, frozen=True):
    """What is asked of the process."""

    token_ids: list[int]
    chunks: Chunks


class _Reply(msgspec.Struct, frozen=True):
    """One answer of the process; the first, empty one says that the engine is up."""

    error: str = ""
    params: KVTransferParams | None = None
    blocks: tuple[int, int] = (0, 0)
    computed_s: float = 0.0
    fetchable_s: float = 0.0


class Producer(Protocol):
    """Computes prompts and hands them over."""

    def offer(self, token_ids: Sequence[int], chunks: Chunks) -> Offered:
        """See `BareEngine.offer`."""
        ...

    def close(self) -> None:
        """End it; idempotent."""
        ...


class ProducerProcess:
    """A producer in a process of its own.

    Args:
        start: what it is built from.

    Raises:
        ConfigError: it does not come up.
    """

    def __init__(self, start: ProducerStart) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, msgspec.msgpack.encode(start)), daemon=True)
        self._process.start()
        theirs.close()
        try:
            self._receive(_START_TIMEOUT_S)
        except HandOffError as error:
            self.close()
            raise ConfigError(f"a producer with connector {start.connector} does not start: {error}") from error

    def offer(self, token_ids: Sequence[int], chunks: Chunks) -> Offered:
        """See `BareEngine.offer`."""
        self._pipe.send_bytes(msgspec.msgpack.encode(_Order(list(token_ids), chunks)))
        reply = self._receive(_REPLY_TIMEOUT_S)
        return Offered(reply.params, slice(*reply.blocks), reply.computed_s, reply.fetchable_s)

    def close(self) -> None:
        """End it; idempotent."""
        self._pipe.close()
        self._process.join(_END_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _receive(self, timeout_s: float) -> _Reply:
        if not self._pipe.poll(timeout_s):
            raise HandOffError("the producer does not answer")
        try:
            reply = msgspec.msgpack.decode(self._pipe.recv_bytes(), type=_Reply)
        except EOFError:
            raise HandOffError("the producer ended") from None
        if reply.error:
            raise HandOffError(reply.error)
        return reply


def _serve(pipe: Connection, start: bytes) -> None:
    """The process: offers prompts until the other end of the pipe is closed."""
    try:
        engine = msgspec.msgpack.decode(start, type=ProducerStart).build()
    except ConfigError as error:
        _send(pipe, _Reply(error=error.message))
        return
    _send(pipe, _Reply())
    busy_s = time.monotonic()
    try:
        while True:
            if pipe.poll(get_transfer_poll_s(time.monotonic() - busy_s) if engine.has_sends else None):
                _send(pipe, _answer(engine, msgspec.msgpack.decode(pipe.recv_bytes(), type=_Order)))
                busy_s = time.monotonic()
            engine.step()
    except EOFError:
        engine.close()


def _answer(engine: BareEngine, order: _Order) -> _Reply:
    try:
        offered = engine.offer(order.token_ids, order.chunks)
    except HandOffError as error:
        return _Reply(error=str(error))
    blocks = (offered.blocks.start, offered.blocks.stop)
    return _Reply("", offered.params, blocks, offered.computed_s, offered.fetchable_s)


def _send(pipe: Connection, reply: _Reply) -> None:
    pipe.send_bytes(msgspec.msgpack.encode(reply))
