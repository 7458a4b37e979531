"""The connector's own settings: parsed from what the user wrote, validated, with their defaults."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, replace
from typing import Any

from pdserve.connectors.base import ConnectorContext
from pdserve.connectors.blocks.options import Parser, parse_number, parse_seconds, parse_text, parse_values
from pdserve.errors import ConfigError
from pdserve.kv_layout import Rank
from pdserve.peers.curve import Curve, Flags, read_curve

CONNECTOR_NAME = "nixl"
_LOOPBACK_NETWORKS = ("127.0.0.0/8", "::1/128")
_LOOPBACK_DEVICE = "lo"
_LAST_PORT = 65535
_CURVE_FLAGS = Flags(
    f"connector {CONNECTOR_NAME}: option curve_secret_key", f"connector {CONNECTOR_NAME}: option curve_peer_keys"
)


@dataclass(frozen=True)
class NixlOptions:
    """Settings of the NIXL connector.

    Attributes:
        host: address that producers listen on for consumers, and that consumers reach them at.
        port: of this rank's side channel; 0 = the system chooses.
        net_devices: network devices that UCX may use, as UCX names them (``eth0``, ``mlx5_0:1``); None = the
            loopback device when ``host`` is a loopback address, else what UCX finds.
        allowed_peers: addresses and networks that KV is exchanged with.
        lease_s: blocks wait this long for a consumer's first or next sign of life.
        answer_timeout_s: an answer or a piece of KV that takes longer ends the load.
        reader_nice: by how much a decode engine's forward pass goes before its reads on a core that they share.
        curve: keys of this engine and of those that KV is exchanged with; None = the side channel is not encrypted.
    """

    host: str = "127.0.0.1"
    port: int = 0
    net_devices: str | None = None
    allowed_peers: tuple[str, ...] = _LOOPBACK_NETWORKS
    lease_s: float = 60.0
    answer_timeout_s: float = 5.0
    reader_nice: int = 10
    curve: Curve | None = None

    @property
    def ucx_devices(self) -> str | None:
        """What to tell UCX; None = nothing."""
        if self.net_devices is None and ipaddress.ip_address(self.host).is_loopback:
            return _LOOPBACK_DEVICE
        return self.net_devices

    @property
    def bind_address(self) -> str:
        """Endpoint to bind the side channel to; without a port when the system chooses it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port or '*'}"


def parse_options(context: ConnectorContext) -> NixlOptions:
    """Validate ``context.options``.

    Raises:
        ConfigError: an option is unknown or ill-typed, the host can be reached by nobody who is allowed to, a key
            file is wrong, or there are fewer ports than ranks.
    """
    values = parse_values(CONNECTOR_NAME, context, _PARSERS)
    curve = read_curve(values.pop("curve_secret_key", None), values.pop("curve_peer_keys", None), _CURVE_FLAGS)
    options = NixlOptions(curve=curve, **values)
    if options.port:
        options = replace(options, port=_choose_port(options.port, context.rank))
    if not ipaddress.ip_address(options.host).is_loopback and "allowed_peers" not in values:
        raise ConfigError(
            f"connector {CONNECTOR_NAME}: option host={options.host} lets other machines in; say which ones, for "
            f"example allowed_peers={options.host}/24 (several: separated by commas)"
        )
    return options


def _choose_port(first_port: int, rank: Rank) -> int:
    """Each rank listens on a port of its own, in order."""
    last_port = first_port + rank.size - 1
    if last_port > _LAST_PORT:
        raise ConfigError(f"connector {CONNECTOR_NAME}: option port={first_port} leaves no ports for {rank.size} ranks")
    return first_port + rank.index


def _parse_host(raw: Any) -> str:
    """An address, not a name: a name's meaning may differ from one machine to the next."""
    address = ipaddress.ip_address(parse_text(raw))
    if address.is_unspecified:
        raise ValueError("give the address at which other machines reach this one")
    return str(address)


def _parse_port(raw: Any) -> int:
    if isinstance(raw, (int, str)) and not isinstance(raw, bool) and 0 <= int(raw) <= _LAST_PORT:
        return int(raw)
    raise ValueError("give a port from 0 to 65535")


def _parse_peers(raw: Any) -> tuple[str, ...]:
    parts = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(parts, (list, tuple)):
        raise ValueError("give addresses and networks, separated by commas")
    networks = tuple(str(ipaddress.ip_network(str(part).strip(), strict=False)) for part in parts)
    if not networks:
        raise ValueError("give at least one address or network")
    return networks


def _parse_positive_seconds(raw: Any) -> float:
    value = parse_seconds(raw)
    if value <= 0:
        raise ValueError("give seconds, more than 0")
    return value


_PARSERS: dict[str, Parser] = {
    "host": _parse_host,
    "port": _parse_port,
    "net_devices": parse_text,
    "allowed_peers": _parse_peers,
    "lease_s": _parse_positive_seconds,
    "answer_timeout_s": _parse_positive_seconds,
    "reader_nice": parse_number(0, 19),
    "curve_secret_key": parse_text,
    "curve_peer_keys": parse_text,
}
