"""CURVE at one end of a ZMQ connection: encrypted, and only with those whose keys are known.

Each process has a key pair of its own and a file with the public keys of its peers. Who binds takes connections from
them; who connects looks up the peer's key by its address, so a stranger there cannot answer. Source: CurveZMQ, RFC 26.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from pdserve.errors import ConfigError
from pdserve.file_stamp import read_stamp
from pdserve.peers.curve_keys import CurveKeyPair, read_key_file, read_key_pair

logger = logging.getLogger(__name__)


class Flags(NamedTuple):
    """How a user writes the two settings, for errors."""

    secret_key: str
    peer_keys: str


FLAGS = Flags("--curve-secret-key", "--curve-peer-keys")


class UnknownPeerError(Exception):
    """Whoever is at an address has no key; the text says where it is missing."""


class PeerKeys:
    """The public keys in a file, read again when it changes. Any thread may ask: at worst the file is read twice.

    A file that became wrong changes nothing: the keys from before stay, and one warning tells of each change.

    Args:
        path: of the file.
        flag: the setting that names it.

    Raises:
        ConfigError: the file is wrong now.
    """

    def __init__(self, path: Path, flag: str) -> None:
        self._path = path
        self._flag = flag
        self._stamp = read_stamp(path)
        self._keys = read_key_file(path, flag)

    def find_name(self, key: bytes) -> str | None:
        """Whose key it is; None if it is none of these."""
        self._refresh()
        return next((name for name, known in self._keys.items() if known == key), None)

    def get_key(self, address: str) -> bytes:
        """The key of whoever is at ``HOST:PORT``: by this name, by ``HOST``, or the file's only one.

        Raises:
            UnknownPeerError: there is none.
        """
        self._refresh()
        host = address.rpartition(":")[0]
        for name in (address, host):
            if name in self._keys:
                return self._keys[name]
        if len(self._keys) == 1:
            return next(iter(self._keys.values()))
        raise UnknownPeerError(f"{self._flag} {self._path} has no key called {address} or {host}")

    def _refresh(self) -> None:
        stamp = read_stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = read_key_file(self._path, self._flag)
        except ConfigError as error:
            logger.warning("the keys of peers were not read again, those from before stay valid: %s", error.message)


class Curve:
    """One process's keys and its peers'.

    Args:
        own: this process's.
        peers: theirs.
    """

    def __init__(self, own: CurveKeyPair, peers: PeerKeys) -> None:
        self._own = own
        self.peers = peers

    def secure_connecting(self, socket: zmq.Socket[Any], address: str) -> None:
        """Call before ``socket`` connects to ``address``, HOST:PORT.

        Raises:
            UnknownPeerError: the peer has no key.
        """
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.peers.get_key(address))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self._own.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._own.secret)

    def secure_binding(self, socket: zmq.Socket[Any]) -> None:
        """Call before ``socket`` binds; a `Gate` in its context says who may connect."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._own.secret)


def read_curve(secret_key: str | None, peer_keys: str | None, flags: Flags = FLAGS) -> Curve | None:
    """The keys that two settings name; None without them.

    Raises:
        ConfigError: a file is wrong, or one setting comes without the other.
    """
    if secret_key is None and peer_keys is None:
        return None
    if secret_key is None or peer_keys is None:
        raise ConfigError(f"{flags.secret_key} and {flags.peer_keys} belong together")
    own = read_key_pair(Path(secret_key).expanduser(), flags.secret_key)
    return Curve(own, PeerKeys(Path(peer_keys).expanduser(), flags.peer_keys))
