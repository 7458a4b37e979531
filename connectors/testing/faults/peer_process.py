"""A producer in a process of its own, to be killed.

The process steps an `EngineHarness` and takes commands: one line each way, base64 of msgpack.
"""

from __future__ import annotations

import base64
import select
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from pdserve.connectors.base import ConnectorContext
from pdserve.connectors.testing.violations import NotOfferedError, RuleViolationError
from pdserve.kv_layout import ModelIdentity
from pdserve.protocol import KVTransferParams, Role

if TYPE_CHECKING:
    from pdserve.connectors.testing.bench import Bench

_REPLY_TIMEOUT_S = 60.0

_T = TypeVar("_T")


class PeerStart(msgspec.Struct, frozen=True):
    """What the process builds its engine from.

    Attributes:
        connector: ``module:Class``.
        engine_id: of this incarnation.
        identity: of the model.
        options: of the connector.
        num_blocks: size of the pool.
    """

    connector: str
    engine_id: str
    identity: ModelIdentity
    options: dict[str, Any]
    num_blocks: int

    def build_context(self) -> ConnectorContext:
        """The context that the connector's halves are built with."""
        return ConnectorContext(self.engine_id, Role.PREFILL, self.identity, self.identity.kv, self.options)


class PeerCommand(msgspec.Struct, frozen=True):
    """Compute a prompt and hand it over; ``waits`` until it can be fetched."""

    token_ids: list[int]
    waits: bool


class PeerReply(msgspec.Struct, frozen=True):
    """The hand-off's parameters, if there are any; the first reply says that the engine is up."""

    params: KVTransferParams | None = None


class PeerProcess:
    """A prefill engine elsewhere; a context manager that leaves no process behind.

    Args:
        bench: whose model and target it shares.
        name: engines of one name are incarnations of one process.
        num_blocks: size of its pool.
        prefix: what the process's command is put behind, so that it runs elsewhere; the process id stays.
    """

    def __init__(self, bench: Bench, name: str, *, num_blocks: int = 64, prefix: Sequence[str] = ()) -> None:
        if not bench.target.crosses_processes:
            raise NotOfferedError("the connector moves KV within one process only")
        context = bench.build_context(Role.PREFILL, name)
        connector = bench.target.connector
        self._start = PeerStart(
            f"{connector.__module__}:{connector.__qualname__}",
            context.engine_id,
            context.identity,
            dict(context.options),
            num_blocks,
        )
        self._prefix = prefix
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [*self._prefix, sys.executable, "-m", "pdserve.connectors.testing.faults.peer_main"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            self._send(self._start)
            self._receive()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def hand_over(self, token_ids: Sequence[int]) -> KVTransferParams | None:
        """Compute a prompt there; the parameters, once its KV can be fetched."""
        self._send(PeerCommand(list(token_ids), waits=True))
        return self._receive().params

    def begin(self, token_ids: Sequence[int]) -> None:
        """Compute a prompt there, and do not wait for its KV to be saved."""
        self._send(PeerCommand(list(token_ids), waits=False))
        self._receive()

    def kill(self) -> None:
        """End the process without a word; idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def _send(self, message: msgspec.Struct) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(encode_line(message))
        self._process.stdin.flush()

    def _receive(self) -> PeerReply:
        assert self._process is not None
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _REPLY_TIMEOUT_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            raise RuleViolationError("R10", "a producer in another process ended, or did not hand its prompt over")
        return decode_line(line, PeerReply)


def encode_line(message: msgspec.Struct) -> bytes:
    """A message as one line."""
    return base64.b64encode(msgspec.msgpack.encode(message)) + b"\n"


def decode_line(line: bytes, message_type: type[_T]) -> _T:
    """A line as a message.

    Raises:
        msgspec.DecodeError: it is none of that type.
    """
    return msgspec.msgpack.decode(base64.b64decode(line), type=message_type)
