"""Sockets of the side channel: ZMQ over TCP, one frame of msgpack a message, bounded.

A producer binds one ROUTER; a consumer connects a DEALER to each producer. Connections from and to addresses that
are not allowed are refused here. Lives on the transfer thread.
"""

from __future__ import annotations

import contextlib
import urllib.parse
from collections.abc import Iterator

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from pdserve.connectors.nixl import wire
from pdserve.connectors.nixl.options import CONNECTOR_NAME, NixlOptions
from pdserve.errors import ConfigError
from pdserve.peers.addresses import AllowedPeers
from pdserve.peers.curve import Curve, UnknownPeerError
from pdserve.peers.gate import Gate

_HEARTBEAT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 4000
_CLOSE_LINGER_MS = 1000
_LOST_EVENTS = zmq.Event.DISCONNECTED | zmq.Event.CONNECT_RETRIED | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL


class Sockets:
    """What all sockets of a transfer thread share."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.poller = zmq.Poller()


class InvalidMessageError(Exception):
    """A producer sent a frame that is no message."""


class ProducerSocket:
    """A producer's end.

    Args:
        sockets: of the transfer thread.
        options: where to listen, and to whom.

    Raises:
        ConfigError: the address cannot be listened on.
    """

    def __init__(self, sockets: Sockets, options: NixlOptions) -> None:
        gate = Gate(sockets.context, allowed_peers=AllowedPeers(options.allowed_peers), curve=options.curve)
        self._socket = sockets.context.socket(zmq.ROUTER)
        gate.guard(self._socket)
        _configure(self._socket, options.host)
        try:
            self._socket.bind(options.bind_address)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise ConfigError(
                f"connector {CONNECTOR_NAME}: cannot listen on {options.bind_address}: {error.strerror}; change the "
                "options host or port"
            ) from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        sockets.poller.register(self._socket, zmq.POLLIN)

    def receive(self) -> Iterator[tuple[bytes, wire.ConsumerMessage | None]]:
        """Everything that has come: who sent it, and the message; None for what is not to be answered."""
        with contextlib.suppress(zmq.Again):
            while True:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
                yield frames[0], self._decode(frames)

    def send(self, reader: bytes, message: wire.ProducerMessage) -> None:
        """Send to one consumer; dropped when it is gone."""
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart([reader, wire.encode(message)], zmq.NOBLOCK)

    def close(self) -> None:
        """Stop listening; what was sent before still goes out."""
        self._socket.close(linger=_CLOSE_LINGER_MS)

    def _decode(self, frames: list[bytes]) -> wire.ConsumerMessage | None:
        if len(frames) != 2:
            return None
        try:
            return wire.decode_consumer_message(frames[1])
        except msgspec.DecodeError:
            return None


class ProducerChannel:
    """A consumer's connection to one producer.

    Args:
        sockets: of the transfer thread; the channel is in their poller until it is closed.
        address: from a reference.
        allowed: addresses that may be connected to.
        curve: keys; None = the connection is not encrypted.

    Raises:
        ValueError: the address is not one to connect to.
    """

    def __init__(self, sockets: Sockets, address: str, allowed: AllowedPeers, curve: Curve | None = None) -> None:
        host = _check_address(address, allowed)
        self.is_closed = False
        self._poller = sockets.poller
        self._socket = sockets.context.socket(zmq.DEALER)
        try:
            if curve is not None:
                curve.secure_connecting(self._socket, address.removeprefix("tcp://"))
        except UnknownPeerError as error:
            self._socket.close(linger=0)
            raise ValueError(str(error)) from None
        _configure(self._socket, host)
        self._monitor = self._socket.get_monitor_socket(_LOST_EVENTS)
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(address)

    def send(self, message: wire.ConsumerMessage) -> None:
        """Send; dropped when nothing more fits, which then shows as an answer that does not come."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(wire.encode(message), zmq.NOBLOCK)

    def receive(self) -> Iterator[wire.ProducerMessage]:
        """Everything that has come, until the channel is closed.

        Raises:
            InvalidMessageError: something that is no message.
        """
        with contextlib.suppress(zmq.Again):
            while not self.is_closed:
                frame = self._socket.recv(zmq.NOBLOCK)
                try:
                    message = wire.decode_producer_message(frame)
                except msgspec.DecodeError as error:
                    raise InvalidMessageError(str(error)) from error
                yield message

    def poll_lost(self) -> bool:
        """Whether the connection broke, or cannot be made."""
        is_lost = False
        while not self.is_closed and self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            is_lost = True
        return is_lost

    def close(self) -> None:
        """Disconnect; what was sent before still goes out. Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            self._poller.unregister(self._socket)
            self._poller.unregister(self._monitor)
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=_CLOSE_LINGER_MS)


def _configure(socket: zmq.Socket[bytes], host: str) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.IPV6, ":" in host)


def _check_address(address: str, allowed: AllowedPeers) -> str:
    """The host in an address of the form ``tcp://host:port``."""
    parts = urllib.parse.urlsplit(address)
    if parts.scheme != "tcp" or parts.port is None or parts.hostname is None or parts.path or parts.query:
        raise ValueError(f"{address!r} is no address of a producer")
    if parts.hostname not in allowed:
        raise ValueError(f"{parts.hostname} is not among the allowed_peers")
    return parts.hostname
