"""Which routers are connected, and since when each has been silent. Pure bookkeeping: no sockets, no clock.

A session belongs to one connection. When the connection breaks, frames may be lost on either side, so a session
never moves to another connection and never comes back once it ended: its Hello is refused, and the router opens
a new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pdserve.protocol import PROTOCOL_VERSION, Hello

_MAX_ENDED = 1024


@dataclass(slots=True)
class Session:
    """One router's connection.

    Attributes:
        number: unique in the process's life.
        router_id: the router's name.
        name: the session's name, which the router chose.
        routing_id: the socket's name of the connection.
        last_seen_s: monotonic time of the last message.
    """

    number: int
    router_id: str
    name: str
    routing_id: bytes
    last_seen_s: float


@dataclass(slots=True)
class HelloResult:
    """What a Hello did.

    Attributes:
        opened: the new session, or None when the Hello only kept one alive or was refused.
        closed: sessions that it replaced; their requests are to be aborted.
        refused: why the Hello is refused, or None.
    """

    opened: Session | None = None
    closed: list[Session] = field(default_factory=list)
    refused: str | None = None


class SessionTable:
    """Live sessions by connection. Lives on the socket thread."""

    def __init__(self) -> None:
        self._by_routing_id: dict[bytes, Session] = {}
        self._ended: dict[tuple[str, str], None] = {}
        self._num_opened = 0

    def __len__(self) -> int:
        return len(self._by_routing_id)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_routing_id.values()))

    def get(self, routing_id: bytes) -> Session | None:
        """The session of a connection."""
        return self._by_routing_id.get(routing_id)

    def hello(self, routing_id: bytes, hello: Hello, now_s: float) -> HelloResult:
        """A Hello came: keep, open, replace or refuse."""
        if hello.protocol_version != PROTOCOL_VERSION:
            return HelloResult(
                refused=f"this instance speaks protocol version {PROTOCOL_VERSION}, "
                f"router {hello.router_id} speaks {hello.protocol_version}"
            )
        current = self._by_routing_id.get(routing_id)
        if current is not None and (current.router_id, current.name) == (hello.router_id, hello.session):
            current.last_seen_s = now_s
            return HelloResult()
        key = (hello.router_id, hello.session)
        over = f"session {hello.session} has ended; open a new one"
        if key in self._ended:
            # Hellos may have waited unread while the process started: a late one must not end its successor.
            return HelloResult(refused=over)
        older = [s for s in self if s.routing_id == routing_id or s.router_id == hello.router_id]
        for session in older:
            self.close(session)
        if key in self._ended:  # it lived on another connection until now
            return HelloResult(closed=older, refused=over)
        self._num_opened += 1
        opened = Session(self._num_opened, hello.router_id, hello.session, routing_id, now_s)
        self._by_routing_id[routing_id] = opened
        return HelloResult(opened=opened, closed=older)

    def close(self, session: Session) -> None:
        """The session ends for good."""
        self._by_routing_id.pop(session.routing_id, None)
        self._ended[session.router_id, session.name] = None
        while len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def expire(self, silent_since_s: float) -> list[Session]:
        """End and return the sessions that were last heard of before ``silent_since_s``."""
        silent = [s for s in self if s.last_seen_s < silent_since_s]
        for session in silent:
            self.close(session)
        return silent

    def excuse(self, duration_s: float) -> None:
        """This process itself was not listening for ``duration_s``: nobody's silence counts."""
        for session in self._by_routing_id.values():
            session.last_seen_s += duration_s
