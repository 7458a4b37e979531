"""Who may connect to the sockets that a process binds: a handler of ZMQ's authentication protocol.

ZMQ asks before a handshake ends; until it is answered, nothing of the peer reaches the socket. Source: ZAP, RFC 27.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import zmq

from pdserve.peers.addresses import AllowedPeers
from pdserve.peers.curve import Curve

logger = logging.getLogger(__name__)

_ENDPOINT = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_DOMAIN = b"pdserve"
_TELL_INTERVAL_S = 10.0


class Gate:
    """Guards sockets of one context, on a thread of its own that ends with the context.

    Args:
        context: of the sockets.
        allowed_peers: addresses that may connect; None = every one.
        curve: keys; None = connections are not encrypted, and whoever has an allowed address may connect.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], *, allowed_peers: AllowedPeers | None, curve: Curve | None
    ) -> None:
        self._allowed_peers = allowed_peers
        self._curve = curve
        self._next_tell_s = 0.0
        # A shadow: who destroys the context must not close this socket, which is the thread's.
        self._socket: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ENDPOINT)
        threading.Thread(target=self._run, name="pdserve-gate", daemon=True).start()

    def guard(self, socket: zmq.Socket[Any]) -> None:
        """Call before ``socket`` binds."""
        socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        # Without an answer nobody gets in.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        if self._curve is not None:
            self._curve.secure_binding(socket)

    def _run(self) -> None:
        try:
            while True:
                _, number, _, address, _, mechanism, *credentials = self._socket.recv_multipart()
                problem = self._find_problem(address.decode(), mechanism, credentials)
                if problem is not None:
                    self._tell(problem)
                status = b"200" if problem is None else b"400"
                self._socket.send_multipart([_VERSION, number, status, b"", b"", b""])
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()

    def _find_problem(self, address: str, mechanism: bytes, credentials: list[bytes]) -> str | None:
        if self._allowed_peers is not None and address not in self._allowed_peers:
            return f"{address} is none of the allowed peers"
        if self._curve is None:
            return None
        if mechanism != b"CURVE" or self._curve.peers.find_name(credentials[0]) is None:
            return f"{address} has none of the keys that are allowed"
        return None

    def _tell(self, problem: str) -> None:
        """Once in a while: whoever is refused comes again at once."""
        now_s = time.monotonic()
        if now_s >= self._next_tell_s:
            self._next_tell_s = now_s + _TELL_INTERVAL_S
            logger.warning("a connection was refused: %s", problem)
