"""Binding an instance's two ports, early and with one plain line when that fails."""

from __future__ import annotations

import errno
import logging
import socket
from dataclasses import dataclass

import zmq

from pdserve.engine.server.settings import InstanceSettings
from pdserve.errors import ConfigError
from pdserve.peers.addresses import AllowedPeers, is_loopback
from pdserve.peers.curve import read_curve
from pdserve.peers.gate import Gate
from pdserve.protocol import MAX_FRAME_BYTES

logger = logging.getLogger(__name__)

_HIGH_WATER_MARK = 8192
_LINGER_MS = 1000


def build_gate(context: zmq.Context[zmq.Socket[bytes]], settings: InstanceSettings) -> Gate | None:
    """Lets in only the routers that the settings allow; None where they allow all.

    Raises:
        ConfigError: a key file or an address is wrong.
    """
    curve = read_curve(settings.curve_secret_key, settings.curve_peer_keys)
    try:
        allowed_peers = AllowedPeers(settings.allowed_peers) if settings.allowed_peers else None
    except ValueError as error:
        raise ConfigError(f"--allowed-peers: {error}") from None
    if curve is None and allowed_peers is None:
        return None
    return Gate(context, allowed_peers=allowed_peers, curve=curve)


def warn_of_open_door(settings: InstanceSettings) -> None:
    """Tell when other machines reach the instance and nothing asks who they are."""
    if settings.curve_secret_key is None and not is_loopback(settings.host):
        logger.warning(
            "whoever reaches %s may use this instance, and what it sends can be read on its way: give "
            "--curve-secret-key and --curve-peer-keys", settings.host
        )  # fmt: skip


def bind_router_socket(
    context: zmq.Context[zmq.Socket[bytes]], host: str, port: int, gate: Gate | None = None
) -> tuple[zmq.Socket[bytes], int]:
    """The ROUTER socket that routers connect to, and the port it got.

    A send to a peer that is gone or does not read fails instead of being dropped in silence: a token stream
    must not have a hole.

    Raises:
        ConfigError: the port is taken or the address is not one of this machine.
    """
    bound = context.socket(zmq.ROUTER)
    if gate is not None:
        gate.guard(bound)
    bound.setsockopt(zmq.ROUTER_MANDATORY, 1)
    bound.setsockopt(zmq.LINGER, _LINGER_MS)
    bound.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    bound.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    # Frames up to this are received, counted and dropped; above it ZMQ cuts the connection by itself.
    bound.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_FRAME_BYTES)
    bound.setsockopt(zmq.IPV6, int(":" in host))
    try:
        bound.bind(f"tcp://{url_host(host)}:{port or '*'}")
    except zmq.ZMQError as error:
        bound.close(linger=0)
        raise _explain(error.errno, str(error), host, port, "--port") from None
    endpoint = bound.getsockopt_string(zmq.LAST_ENDPOINT)
    return bound, int(endpoint.rpartition(":")[2])


def bind_http_socket(host: str, port: int, flag: str = "--http-port") -> socket.socket:
    """A listening TCP socket for an HTTP port that ``flag`` sets.

    Raises:
        ConfigError: the port is taken or the address is not one of this machine.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen()
    except OSError as error:
        bound.close()
        raise _explain(error.errno, str(error), host, port, flag) from None
    return bound


def url_host(host: str) -> str:
    """``host`` as it stands in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


@dataclass(frozen=True)
class ReadyNote:
    """What a ready file says."""

    instance_id: str
    generation: str
    role: str
    pid: int
    address: str
    http: str


def _explain(code: int | None, text: str, host: str, port: int, flag: str) -> ConfigError:
    if code == errno.EADDRINUSE:
        return ConfigError(f"port {port} on {host} is in use; choose another with {flag}")
    if code in (errno.EADDRNOTAVAIL, errno.ENODEV, socket.EAI_NONAME):
        return ConfigError(f"{host} is not an address of this machine; choose another with --host")
    return ConfigError(f"cannot listen on {host}:{port} ({flag}): {text}")
