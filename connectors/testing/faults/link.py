"""A bad link: a proxy between a connector and its server that does damage on demand.

Byte streams only (TCP or unix sockets). Threads of its own; whoever builds it closes it.
"""

from __future__ import annotations

import contextlib
import enum
import socket
import threading
import time
from collections.abc import Callable, Iterator

_CHUNK_BYTES = 16384
_DELAY_S = 0.02
_LEAST_DAMAGED_BYTES = 64

Address = str | tuple[str, int]
"""Path of a unix socket, or host and port."""


class Damage(enum.Enum):
    """What happens to bytes from the server while it lasts; the value completes "a link that …"."""

    NONE = "works"
    DELAY = "is slow"
    FLIP = "flips bits"
    REPEAT = "repeats what it said"
    DROP = "loses bytes"
    TRUNCATE = "breaks off in the middle"
    STALL = "says nothing"
    CUT = "is cut"


class FaultyLink:
    """Listens in the server's place.

    Args:
        server: address of the real one.
        listen: address of its own; port 0 = the system chooses.

    Attributes:
        address: where to connect.
    """

    def __init__(self, server: Address, listen: Address) -> None:
        self._server = server
        self._damage = Damage.NONE
        self._changed = threading.Condition()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._listener = socket.socket(_get_family(listen))
        self._listener.bind(listen)
        self._listener.listen()
        self.address: Address = self._listener.getsockname()
        self._start(self._accept)

    @contextlib.contextmanager
    def inflict(self, damage: Damage) -> Iterator[None]:
        """Do damage inside; connections that suffered are closed at the end, as a client would."""
        self._set_damage(damage)
        if damage is Damage.CUT:
            self._close_connections()
        try:
            yield
        finally:
            self._set_damage(Damage.NONE)
            self._close_connections()

    def close(self) -> None:
        """End all connections and threads; idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._close_connections()
        for thread in self._threads:
            thread.join()

    def _set_damage(self, damage: Damage) -> None:
        with self._changed:
            self._damage = damage
            self._changed.notify_all()

    def _close_connections(self) -> None:
        with self._changed:
            sockets, self._sockets = self._sockets, set()
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, name="faulty-link", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.socket(_get_family(self._server))
            try:
                if self._damage is Damage.CUT:
                    raise ConnectionRefusedError
                server.connect(self._server)
            except OSError:
                client.close()
                server.close()
                continue
            with self._changed:
                self._sockets.update((client, server))
            self._start(self._pump, client, server, False)
            self._start(self._pump, server, client, True)

    def _pump(self, source: socket.socket, sink: socket.socket, damages: bool) -> None:
        """Carry bytes one way until either end is gone."""
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                self._carry(data, sink, self._damage if damages else Damage.NONE)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        source.close()

    def _carry(self, data: bytes, sink: socket.socket, damage: Damage) -> None:
        middle = len(data) // 2
        is_small = len(data) < _LEAST_DAMAGED_BYTES
        match damage:
            case Damage.DELAY:
                time.sleep(_DELAY_S)
            case Damage.FLIP if not is_small:
                data = data[:middle] + bytes([data[middle] ^ 0x04]) + data[middle + 1 :]
            case Damage.REPEAT if not is_small:
                data += data
            case Damage.DROP if not is_small:
                data = data[:middle] + data[middle + 7 :]
            case Damage.TRUNCATE if not is_small:
                sink.sendall(data[:middle])
                raise ConnectionResetError
            case Damage.STALL:
                with self._changed:
                    self._changed.wait_for(lambda: self._damage is not Damage.STALL or self._is_closed)
        sink.sendall(data)


def _get_family(address: Address) -> socket.AddressFamily:
    return socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
