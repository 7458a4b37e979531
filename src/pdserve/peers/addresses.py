"""Addresses of other machines: which are allowed, and which are this machine's own."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class AllowedPeers:
    """The addresses that may be spoken to.

    Args:
        networks: single addresses or networks (``10.0.0.0/24``).

    Raises:
        ValueError: one of them is neither.
    """

    def __init__(self, networks: Iterable[str]) -> None:
        self._networks: list[Network] = [ipaddress.ip_network(network) for network in networks]

    def __contains__(self, host: str) -> bool:
        """Whether ``host``, an address in text, is one of them; what is no address is not."""
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches ``host``, a name or an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
