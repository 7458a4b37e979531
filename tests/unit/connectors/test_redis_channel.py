"""The protocol, on a pair of connected sockets: replies in any pieces, deadlines, and what no server says."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from pdserve.connectors.blocks.failures import Failure
from pdserve.connectors.redis.channel import Channel, Command, ProtocolError


class Connection:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.is_connected = True

    def disconnect(self) -> None:
        self.is_connected = False


class Pool:
    """One connection; stands in for redis-py's pool."""

    def __init__(self, sock: socket.socket) -> None:
        self.connection = Connection(sock)
        self.num_released = 0

    def get_connection(self) -> Connection:
        return self.connection

    def release(self, connection: Connection) -> None:
        self.num_released += 1


class Link:
    """A channel and the server's end of it."""

    def __init__(self, timeout_s: float = 10.0) -> None:
        mine, self.server = socket.socketpair()
        self.pool = Pool(mine)
        self.channel = Channel(self.pool, time.monotonic() + timeout_s, time.monotonic)

    def expect(self, *replies: bytes) -> Channel:
        """As if so many commands had been sent and the server had answered."""
        for _ in replies:
            self.channel.queue(Command(b"GET", b"k"))
        self.server.sendall(b"".join(replies))
        return self.channel

    def close(self) -> None:
        self.pool.connection._sock.close()
        self.server.close()


@pytest.fixture
def make_link() -> Iterator[Callable[..., Link]]:
    links: list[Link] = []

    def make(timeout_s: float = 10.0) -> Link:
        links.append(Link(timeout_s))
        return links[-1]

    yield make
    for link in links:
        link.close()


def test_commands_go_out_as_they_must(make_link) -> None:
    link = make_link()
    link.channel.queue(Command(b"STRLEN", b"key"))
    link.channel.queue(Command(b"SET", b"key", (memoryview(b"v\r\n"), b"EX", b"60")))
    link.channel.flush()
    wanted = (
        b"*2\r\n$6\r\nSTRLEN\r\n$3\r\nkey\r\n*5\r\n$3\r\nSET\r\n$3\r\nkey\r\n$3\r\nv\r\n\r\n$2\r\nEX\r\n$2\r\n60\r\n"
    )
    assert link.server.recv(1000) == wanted


def test_what_the_system_takes_in_pieces_arrives_whole(make_link) -> None:
    """More parts than one call takes, and more bytes than the socket holds."""
    link = make_link()
    values = [bytes([index % 256]) * (index % 7) for index in range(2000)] + [b"large" * 500_000]
    wanted = b"".join(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n%b\r\n" % (len(value), value) for value in values)
    for value in values:
        link.channel.queue(Command(b"SET", b"k", (memoryview(value),)))
    found = bytearray()

    def receive() -> None:
        while len(found) < len(wanted) and (piece := link.server.recv(1 << 16)):
            found.extend(piece)

    reader = threading.Thread(target=receive)
    reader.start()
    link.channel.flush()
    reader.join()
    assert found == wanted


def feed_in_pieces(link: Link, pieces: list[bytes]) -> None:
    """Each receive finds one piece more."""
    left = iter([piece for piece in pieces if piece])
    receive = link.channel._receive

    def receive_next(target: memoryview) -> int:
        link.server.sendall(next(left, b""))
        return receive(target)

    link.channel._receive = receive_next


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_replies_in_any_pieces(make_link, size: int) -> None:
    stream = b":12\r\n$6\r\nab\r\ncd\r\n$-1\r\n+OK\r\n-OOM no\r\n$0\r\n\r\n"
    for offset in range(len(stream)):
        link = make_link()
        for _ in range(6):
            link.channel.queue(Command(b"GET", b"k"))
        feed_in_pieces(link, [stream[:offset], *(stream[i : i + size] for i in range(offset, len(stream), size))])
        channel = link.channel
        assert channel.read_number() == 12
        value = bytearray(6)
        assert channel.read_value_length() == 6
        channel.read_into(memoryview(value)[:1])
        channel.read_into(memoryview(value)[1:])
        channel.end_value()
        assert value == b"ab\r\ncd"
        assert channel.read_value_length() == Failure("missing", "the server does not have it any more")
        assert channel.read_ok() is None
        assert channel.read_ok() == Failure("no_space", "OOM no")
        assert channel.read_value_length() == 0
        channel.end_value()
        channel.close()
        assert link.pool.connection.is_connected


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (b"OOM command not allowed", "no_space"),
        (b"NOAUTH Authentication required.", "permission"),
        (b"NOPERM this user", "permission"),
        (b"READONLY replica", "moved"),
        (b"LOADING dataset", "unreachable"),
        (b"BUSY running a script", "unreachable"),
        (b"MISCONF cannot persist", "io"),
        (b"CLUSTERDOWN down", "unreachable"),
        (b"MOVED 1 host:1", "moved"),
        (b"ASK 1 host:1", "moved"),
        (b"WRONGTYPE list", "io"),
        (b"ERR \xff", "io"),
    ],
)
def test_refusals_have_kinds_wherever_they_come(make_link, message: bytes, kind: str) -> None:
    channel = make_link().expect(*[b"-" + message + b"\r\n"] * 3)
    for read in (channel.read_number, channel.read_ok, channel.read_value_length):
        failure = read()
        assert isinstance(failure, Failure)
        assert failure.kind == kind


@pytest.mark.parametrize(
    "stream", [b"*1\r\n", b">2\r\n", b"$3\r\nabc\r\n", b"?\r\n", b"\r\n", b"x" * 10000, b":0\t\n:0\r\n", b":\r\n"]
)
def test_what_no_server_says_ends_the_connection(make_link, stream: bytes) -> None:
    link = make_link()
    channel = link.expect(stream)
    with pytest.raises(ProtocolError):
        channel.read_number()
    channel.close()
    assert not link.pool.connection.is_connected
    assert link.pool.num_released == 1


def test_a_length_that_is_no_number_ends_the_connection(make_link) -> None:
    link = make_link()
    channel = link.expect(b"$1x\r\n")
    with pytest.raises(ProtocolError, match="no number"):
        channel.read_value_length()
    channel.close()
    assert not link.pool.connection.is_connected


def test_a_value_longer_than_announced(make_link) -> None:
    channel = make_link().expect(b"$2\r\nabc\r\n")
    channel.read_value_length()
    channel.read_into(memoryview(bytearray(2)))
    with pytest.raises(ProtocolError, match="longer than announced"):
        channel.end_value()


def test_a_server_that_says_more_than_it_was_asked_loses_its_connection(make_link) -> None:
    """What follows would be taken for the answer to the next question."""
    link = make_link()
    channel = link.expect(b":1\r\n")
    link.server.sendall(b":2\r\n")
    assert channel.read_number() == 1
    channel.close()
    assert not link.pool.connection.is_connected


def test_a_server_that_hangs_up(make_link) -> None:
    link = make_link()
    channel = link.expect(b"$10\r\nabc")
    link.server.shutdown(socket.SHUT_RDWR)
    channel.read_value_length()
    with pytest.raises(ProtocolError, match="closed the connection"):
        channel.read_into(memoryview(bytearray(10)))


def test_nothing_waits_beyond_the_deadline(make_link) -> None:
    """A server that sends a byte now and then does not keep anybody for longer."""
    link = make_link(0.3)
    channel = link.expect(b"$1000\r\n")
    receive = channel._receive

    def drip(target: memoryview) -> int:
        link.server.sendall(b"x")
        return receive(target)

    assert channel.read_value_length() == 1000
    channel._receive = drip
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        channel.read_into(memoryview(bytearray(1 << 20)))
    assert 0.1 < time.monotonic() - began < 5


def test_a_server_that_takes_nothing(make_link) -> None:
    channel = make_link(0.1).channel
    channel.queue(Command(b"SET", b"k", (memoryview(bytes(64 << 20)),)))
    with pytest.raises(TimeoutError):
        channel.flush()


def test_a_values_end_comes_with_the_beginning_of_the_next(make_link, monkeypatch: pytest.MonkeyPatch) -> None:
    values = [bytes([index]) * 40_000 for index in range(4)]
    channel = make_link().expect(*(b"$40000\r\n" + value + b"\r\n" for value in values))
    receive, sizes = channel._receive, []
    monkeypatch.setattr(channel, "_receive", lambda target: sizes.append(len(target)) or receive(target))
    for value in values:
        target = bytearray(channel.read_value_length())
        channel.read_into(memoryview(target))
        channel.end_value()
        assert target == value
    assert len(sizes) <= len(values) + 1
