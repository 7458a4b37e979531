"""Settings of an instance, besides those of its engine."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from pdserve.engine.config import EngineConfig
from pdserve.protocol import Role
from pdserve.settings import section, setting

_HTTP_PORT_DISTANCE = 1000
_MAX_PORT = 65535
_EVERY_ADDRESS = ("0.0.0.0", "::")


@dataclass(frozen=True)
class InstanceSettings:
    """Where the instance listens, and how it starts and stops."""

    host: str = setting("127.0.0.1", help="address to listen on; 0.0.0.0 for every one", metavar="ADDRESS")
    port: int = setting(0, help="port that routers connect to; 0 = the system chooses", minimum=0, maximum=_MAX_PORT)
    http_port: int | None = setting(
        None,
        help="port of /health, /ready, /metrics and /drain; 0 = the system chooses; default: port + 1000",
        minimum=0,
        maximum=_MAX_PORT,
    )
    instance_id: str | None = setting(None, help="name of this instance; default: role-host-port")
    drain_timeout_s: float = setting(
        30.0, help="on SIGTERM or POST /drain, running requests have this long to finish", minimum=0
    )
    session_timeout_s: float = setting(
        10.0, help="a router silent for this long is given up and its requests are aborted", minimum=0.1
    )
    heartbeat_interval_s: float = setting(1.0, help="routers hear of the load this often", minimum=0.01)
    discovery: str | None = setting(
        None, help="Redis where this instance announces itself to routers, like redis://host:6379/0", metavar="URL"
    )
    advertise_host: str | None = setting(
        None, help="host that routers connect to; default: --host, or this machine's name for 0.0.0.0", metavar="HOST"
    )
    curve_secret_key: str | None = setting(
        None, help="this instance's .secret file (pdserve keys curve): routers connect encrypted", metavar="PATH"
    )
    curve_peer_keys: str | None = setting(
        None, help="public keys of the routers that may connect, read again when the file changes", metavar="PATH"
    )
    allowed_peers: list[str] = setting(
        [], help="addresses or networks that routers may connect from; default: all", metavar="NETWORK"
    )
    debug_blocks: bool = setting(False, help="serve GET /debug/blocks: who holds which KV block, and since when")
    watchdog_interval_s: float = setting(
        0.0, help="compare KV blocks with their holders this often and tell of mistakes; 0 = never", minimum=0
    )
    max_transfer_age_s: float = setting(
        300.0, help="the watchdog tells of KV transfers under way for longer than this", minimum=1
    )
    log_level: str | None = setting(None, help="debug, info, warning or error; default: PDSERVE_LOG_LEVEL, else info")
    ready_file: str | None = setting(None, help="once ready, write the addresses to this file as JSON", metavar="PATH")

    def resolve_http_port(self) -> int:
        """The HTTP port to bind; 0 where the system chooses."""
        if self.http_port is not None:
            return self.http_port
        wanted = self.port + _HTTP_PORT_DISTANCE if self.port else 0
        return wanted if wanted <= _MAX_PORT else 0

    def resolve_advertised_address(self, port: int) -> str:
        """HOST:PORT where routers find the instance."""
        host = self.advertise_host or (socket.gethostname() if self.host in _EVERY_ADDRESS else self.host)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def resolve_instance_id(self, role: Role, port: int) -> str:
        """The instance's name, with the port that was bound."""
        return self.instance_id or f"{role}-{self.host}-{port}"


@dataclass(frozen=True)
class InstanceConfig:
    """All settings of an instance's process."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    instance: InstanceSettings = section(InstanceSettings)
