"""The socket of one session with an instance, and what ZMQ tells of its connection. Lives on the event loop."""

from __future__ import annotations

import zmq
import zmq.asyncio

from pdserve.peers.curve import Curve
from pdserve.protocol import MAX_FRAME_BYTES

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
)
_NO_HANDSHAKE = (
    "no handshake: its CURVE key is another one, or only one side has keys, or whoever listens there is no instance"
)
_REFUSALS = {
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "it takes neither this router's key nor its address",
    int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL): _NO_HANDSHAKE,
    int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL): _NO_HANDSHAKE,
}


def build_socket(context: zmq.asyncio.Context, curve: Curve | None, address: str) -> zmq.asyncio.Socket:
    """A socket that may connect to ``address`` (HOST:PORT) once and never again by itself.

    Raises:
        UnknownPeerError: connections are encrypted and there is no key for the address.
    """
    socket = context.socket(zmq.DEALER)
    # Everything in flight is bounded by the requests in flight; a high-water mark would drop tokens.
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.IMMEDIATE, 1),
        (zmq.RECONNECT_IVL, -1),
        (zmq.SNDHWM, 0),
        (zmq.RCVHWM, 0),
    ):
        socket.setsockopt(option, value)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    try:
        if curve is not None:
            curve.secure_connecting(socket, address)
    except BaseException:
        socket.close()
        raise
    return socket


def watch(socket: zmq.asyncio.Socket) -> zmq.asyncio.Socket:
    """The monitor that tells when the connection stands and when it ends."""
    return socket.get_monitor_socket(_EVENTS)


def find_refusal(event: int) -> str | None:
    """Why the other end does not want this router, where ``event`` says so."""
    return _REFUSALS.get(event)
