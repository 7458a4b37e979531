"""One connection during one exchange: commands out, replies in, everything before one deadline.

Speaks the protocol's version 2 on a connection that redis-py has opened and authenticated. Values go from their
buffer to the socket and from the socket into KV memory without a copy in between: the client library's own way
through Python objects takes two to four times as long for values of this size.

Reference: Redis serialization protocol specification, https://redis.io/docs/latest/develop/reference/protocol-spec/
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import NamedTuple

import redis

from pdserve.connectors.blocks.failures import Failure

Part = bytes | memoryview
_BUFFER_BYTES = 16 << 10
_MAX_TEXT_BYTES = 8 << 10
# Of one call; more are refused by the system.
_MAX_PARTS = 1024
# What a unix socket takes before the server reads: the usual 208 KiB are half a block, and every refill costs two
# switches between processes. TCP finds its own size.
_UNIX_SEND_BUFFER_BYTES = 2 << 20
_KINDS = {
    "OOM": "no_space",
    "NOAUTH": "permission",
    "NOPERM": "permission",
    "WRONGPASS": "permission",
    "LOADING": "unreachable",
    "BUSY": "unreachable",
    "MASTERDOWN": "unreachable",
    "CLUSTERDOWN": "unreachable",
    "TRYAGAIN": "unreachable",
    "READONLY": "moved",
    "MOVED": "moved",
    "ASK": "moved",
}


class Command(NamedTuple):
    """A command about one key.

    Attributes:
        name: what to do.
        key: with what.
        arguments: follow the key.
        lane: commands of one lane share a connection and are answered in order; lanes run side by side.
    """

    name: bytes
    key: bytes
    arguments: tuple[Part, ...] = ()
    lane: int = 0


class ProtocolError(Exception):
    """The server said what no server says, or hung up."""


class Channel:
    """Used by one thread, for one exchange.

    Args:
        pool: where the connection comes from and goes back to.
        deadline: on ``clock``; nothing waits beyond it.
        clock: monotonic seconds.

    Attributes:
        deadline: may be put off.

    Raises:
        redis.RedisError: no connection within the pool's own timeout, or the server refuses the user.
    """

    def __init__(self, pool: redis.ConnectionPool, deadline: float, clock: Callable[[], float]) -> None:
        self._pool = pool
        self.deadline = deadline
        self._clock = clock
        self._connection = pool.get_connection()
        # redis-py gives its socket to parsers only, under this name.
        self._socket: socket.socket = self._connection._sock
        # A call that would have to wait says so, and only then is waited for: most often there is something to receive.
        self._socket.setblocking(False)
        if self._socket.family == socket.AF_UNIX:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_SEND_BUFFER_BYTES)
        self._bytes = bytearray(_BUFFER_BYTES)
        self._buffer = memoryview(self._bytes)
        self._start = self._end = 0
        self._is_tls = isinstance(self._socket, ssl.SSLSocket)
        self._unsent: list[memoryview] = []
        self._text: list[bytes] = []
        self._num_owed = 0

    def queue(self, command: Command) -> None:
        """Add a command to what `flush` sends."""
        name, key, arguments, _ = command
        text = self._text
        text.append(b"*%d\r\n" % (len(arguments) + 2))
        for argument in (name, key, *arguments):
            if isinstance(argument, memoryview):
                text.append(b"$%d\r\n" % len(argument))
                self._unsent += (memoryview(b"".join(text)), argument)
                text[:] = (b"\r\n",)
            else:
                text.append(b"$%d\r\n%b\r\n" % (len(argument), argument))
        self._num_owed += 1

    def flush(self) -> None:
        """Send what is queued, if anything.

        Raises:
            OSError: the connection broke, or the deadline passed (TimeoutError).
        """
        if not (self._unsent or self._text):
            return
        parts = [*self._unsent, memoryview(b"".join(self._text))]
        self._unsent.clear()
        self._text.clear()
        first = 0
        while first < len(parts):
            count = self._send(parts[first : first + _MAX_PARTS])
            while first < len(parts) and count >= len(parts[first]):
                count -= len(parts[first])
                first += 1
            if count:
                parts[first] = parts[first][count:]

    def read_number(self) -> int | Failure:
        """A reply that is a number.

        Raises:
            ProtocolError: it is something else.
            OSError: the connection broke, or the deadline passed.
        """
        mark, text = self._read_line()
        if mark != b":":
            return self._read_failure(mark, text)
        number = _parse_number(text)
        self._num_owed -= 1
        return number

    def read_ok(self) -> Failure | None:
        """A reply that says no more than that the command was done.

        Raises:
            ProtocolError: it is something else.
            OSError: the connection broke, or the deadline passed.
        """
        mark, text = self._read_line()
        if mark != b"+":
            return self._read_failure(mark, text)
        self._num_owed -= 1
        return None

    def read_value_length(self) -> int | Failure:
        """Begin a reply that is a value: its length; `read_into` must fetch it and `end_value` end it.

        Raises:
            ProtocolError: it is something else.
            OSError: the connection broke, or the deadline passed.
        """
        mark, text = self._read_line()
        if mark != b"$":
            return self._read_failure(mark, text)
        length = _parse_number(text)
        if length < 0:
            self._num_owed -= 1
            return Failure("missing", "the server does not have it any more")
        return length

    def read_into(self, target: memoryview) -> None:
        """The next bytes of a value.

        Raises:
            ProtocolError: the server hung up.
            OSError: the connection broke, or the deadline passed.
        """
        count = min(len(target), self._end - self._start)
        target[:count] = self._buffer[self._start : self._start + count]
        self._start += count
        while count < len(target):
            target = target[count:]
            count = self._receive(target)

    def end_value(self) -> None:
        """The value was read whole.

        Raises:
            ProtocolError: there is more of it.
            OSError: the connection broke, or the deadline passed.
        """
        end = bytearray(2)
        self.read_into(memoryview(end))
        if end != b"\r\n":
            raise ProtocolError("a value is longer than announced")
        self._num_owed -= 1

    def close(self, *, keeps_connection: bool = True) -> None:
        """Give the connection back; closed, if it is not to be kept, owes a reply or said more than it was asked."""
        if self._num_owed or self._start < self._end or not keeps_connection:
            self._connection.disconnect()
        self._pool.release(self._connection)

    def _read_failure(self, mark: bytes, text: bytes) -> Failure:
        if mark != b"-":
            raise ProtocolError(f"unexpected reply of type {mark!r}")
        self._num_owed -= 1
        message = text.decode(errors="replace")
        return Failure(_KINDS.get(message.partition(" ")[0], "io"), message)

    def _read_line(self) -> tuple[bytes, bytes]:
        """Type and text of the next line."""
        line = b""
        while not line.endswith(b"\r\n"):
            if self._start == self._end:
                self._receive(self._buffer[:0])
            found = self._bytes.find(b"\n", self._start, self._end)
            end = self._end if found < 0 else found + 1
            line += self._bytes[self._start : end]
            self._start = end
            if len(line) > _MAX_TEXT_BYTES:
                raise ProtocolError("a line does not end")
        return line[:1], line[1:-2]

    def _send(self, parts: Sequence[memoryview]) -> int:
        """Send a beginning of ``parts``; how many bytes went."""
        while True:
            self._get_remaining_s()  # also who always finds something ends in time
            try:
                return self._socket.send(parts[0]) if self._is_tls else self._socket.sendmsg(parts)
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError) as error:
                self._wait(select.POLLIN if isinstance(error, ssl.SSLWantReadError) else select.POLLOUT)

    def _receive(self, target: memoryview) -> int:
        """Receive into ``target``, and what follows it into the buffer, which is empty; how much of ``target`` came.

        The next reply's beginning costs no call of its own then.
        """
        count = self._receive_some(target)
        if count == 0:
            raise ProtocolError("the server closed the connection")
        count_of_target = min(count, len(target))
        self._start, self._end = 0, count - count_of_target
        return count_of_target

    def _receive_some(self, target: memoryview) -> int:
        while True:
            self._get_remaining_s()  # also who always finds something ends in time
            try:
                if self._is_tls:
                    return self._socket.recv_into(target or self._buffer)
                return self._socket.recvmsg_into([target, self._buffer])[0]
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError) as error:
                self._wait(select.POLLOUT if isinstance(error, ssl.SSLWantWriteError) else select.POLLIN)

    def _wait(self, event: int) -> None:
        """Wait until something can be received, or sent, or the deadline has come."""
        poll = select.poll()
        poll.register(self._socket, event)
        poll.poll(self._get_remaining_s() * 1e3)

    def _get_remaining_s(self) -> float:
        remaining = self.deadline - self._clock()
        if remaining <= 0:
            raise TimeoutError
        return remaining


def _parse_number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ProtocolError(f"{text[:20]!r} is no number") from error
