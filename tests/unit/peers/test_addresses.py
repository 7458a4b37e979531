from __future__ import annotations

import pytest

from pdserve.peers.addresses import AllowedPeers, is_loopback


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("10.0.0.7", True),
        ("::ffff:10.0.0.7", True),
        ("10.0.1.7", False),
        ("192.168.1.1", True),
        ("::1", True),
        ("::2", False),
        ("10.0.0.1:80", False),
        ("localhost", False),
        ("", False),
    ],
)
def test_addresses_in_the_networks_are_allowed(host: str, is_allowed: bool) -> None:
    assert (host in AllowedPeers(["10.0.0.0/24", "192.168.1.1", "::1/128"])) is is_allowed


@pytest.mark.parametrize("network", ["10.0.0.0/33", "10.0.0.1/24", "machine.example", ""])
def test_what_is_no_network_is_refused(network: str) -> None:
    with pytest.raises(ValueError, match=r"network|address|host bits"):
        AllowedPeers([network])


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False),
     ("10.0.0.1", False), ("machine.example", False)],
)  # fmt: skip
def test_only_loopback_is_this_machine_alone(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
