"""What an instance tells of itself and its machine at ``GET /about``: what ``pdserve doctor`` compares.

No secrets: options whose names speak of one, and what stands before the ``@`` of a URL, are left out.
"""

from __future__ import annotations

import os
import re
import socket
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

import pdserve
from pdserve.connectors.registry import load_connector
from pdserve.engine.config import ConnectorSettings
from pdserve.protocol import PROTOCOL_VERSION, Role

SHARED_MEMORY = Path("/dev/shm")
_REACH_TIMEOUT_S = 2.0
_SECRET = re.compile(r"password|secret|token|credential|key$", re.IGNORECASE)
_USER_INFO = re.compile(r"//[^/@]*@")


class Directory(msgspec.Struct, frozen=True, kw_only=True):
    """A directory as this process sees it.

    Attributes:
        path: where it is.
        is_usable: it exists, and this process may read and write there.
        free_bytes: of its file system.
        total_bytes: of its file system.
    """

    path: str
    is_usable: bool
    free_bytes: int = 0
    total_bytes: int = 0


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """A server that the connector speaks to, as this process sees it.

    Attributes:
        url: where it is.
        is_reachable: something listens there.
    """

    url: str
    is_reachable: bool


class About(msgspec.Struct, frozen=True, kw_only=True):
    """An instance's own description.

    Attributes:
        instance_id: its name.
        generation: this start of it.
        role: its pool.
        version: of pdserve.
        protocol_version: what it speaks with routers.
        time_ns: its clock, now.
        host: its machine's name.
        connector: registered name.
        connector_options: as configured, without secrets.
        store: the connector's directory, where it has one.
        server: the connector's server, where it has one.
        shared_memory: /dev/shm.
    """

    instance_id: str
    generation: str
    role: Role
    version: str
    protocol_version: int
    time_ns: int
    host: str
    connector: str
    connector_options: dict[str, Any]
    store: Directory | None
    server: Server | None
    shared_memory: Directory


def build_about(*, instance_id: str, generation: str, role: Role, connector: ConnectorSettings) -> About:
    """The description, as of now."""
    store, server = find_store(connector), find_server(connector)
    return About(
        instance_id=instance_id,
        generation=generation,
        role=role,
        version=pdserve.__version__,
        protocol_version=PROTOCOL_VERSION,
        time_ns=time.time_ns(),
        host=socket.gethostname(),
        connector=connector.connector,
        connector_options=_without_secrets(connector.connector_options),
        store=None if store is None else look_at(store),
        server=None if server is None else try_to_reach(server),
        shared_memory=look_at(SHARED_MEMORY),
    )


def find_store(connector: ConnectorSettings) -> Path | None:
    """The directory that the connector keeps KV in; None where it has none.

    A connector with a directory says so by a class method ``get_directory(options)``.
    """
    get_directory = getattr(load_connector(connector.connector), "get_directory", None)
    return None if get_directory is None else Path(get_directory(connector.connector_options))


def find_server(connector: ConnectorSettings) -> str | None:
    """The URL of the server that the connector keeps KV in; None where it has none.

    A connector with a server says so by a class method ``get_server(options)``.
    """
    get_server = getattr(load_connector(connector.connector), "get_server", None)
    return None if get_server is None else str(get_server(connector.connector_options))


def try_to_reach(url: str) -> Server:
    """Open a connection and close it again: a unix socket's, or TCP's to the URL's host and port."""
    parts = urlsplit(url)
    try:
        if parts.scheme == "unix":
            with socket.socket(socket.AF_UNIX) as trying:
                trying.settimeout(_REACH_TIMEOUT_S)
                trying.connect(parts.path)
        else:
            socket.create_connection((parts.hostname or "", parts.port or 0), _REACH_TIMEOUT_S).close()
    except OSError:
        return Server(url=url, is_reachable=False)
    return Server(url=url, is_reachable=True)


def look_at(path: Path) -> Directory:
    """The directory's state; one that is not there is not usable."""
    try:
        stats = os.statvfs(path)
    except OSError:
        return Directory(path=str(path), is_usable=False)
    return Directory(
        path=str(path),
        is_usable=path.is_dir() and os.access(path, os.R_OK | os.W_OK | os.X_OK),
        free_bytes=stats.f_bavail * stats.f_frsize,
        total_bytes=stats.f_blocks * stats.f_frsize,
    )


def _without_secrets(options: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _USER_INFO.sub("//", value) if isinstance(value, str) else value
        for name, value in options.items()
        if not _SECRET.search(name)
    }
