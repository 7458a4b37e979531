"""Who gets through a gate, over real connections on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from pdserve.peers.addresses import AllowedPeers
from pdserve.peers.curve import Curve, read_curve
from pdserve.peers.curve_keys import make_key_pair
from pdserve.peers.gate import Gate

DEADLINE_MS = 30_000
LOOPBACK, ELSEWHERE = AllowedPeers(["127.0.0.0/8"]), AllowedPeers(["10.0.0.0/8"])


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """Pairs of a, b and c, and a list of two of them."""
    for name in "abc":
        make_key_pair(name, tmp_path)
    (tmp_path / "b+c").write_text("".join((tmp_path / f"{name}.public").read_text() for name in "bc"))
    return tmp_path


def read(keys: Path, own: str | None, peers: str | None) -> Curve | None:
    if own is None or peers is None:
        return None
    return read_curve(str(keys / f"{own}.secret"), str(keys / peers))


class Door:
    """A guarded socket that was bound."""

    def __init__(self, allowed: AllowedPeers | None, curve: Curve | None) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        Gate(self.context, allowed_peers=allowed, curve=curve).guard(self.socket)
        self.address = f"127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"

    def knock(self, curve: Curve | None) -> bool:
        """Whether a message of a new connection comes through."""
        context = zmq.Context()
        knocking = context.socket(zmq.DEALER)
        knocking.setsockopt(zmq.LINGER, 0)
        knocking.setsockopt(zmq.RECONNECT_IVL, -1)
        monitor = knocking.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        if curve is not None:
            curve.secure_connecting(knocking, self.address)
        knocking.connect(f"tcp://{self.address}")
        try:
            knocking.send(b"hello")
            assert monitor.poll(DEADLINE_MS), "neither let in nor refused"
            if recv_monitor_message(monitor)["event"] != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                assert not self.socket.poll(0)
                return False
            assert self.socket.poll(DEADLINE_MS)
            assert self.socket.recv_multipart()[1] == b"hello"
            return True
        finally:
            knocking.disable_monitor()
            monitor.close(linger=0)
            knocking.close()
            context.term()

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def doors() -> Iterator[list[Door]]:
    made: list[Door] = []
    yield made
    for door in made:
        door.close()


@pytest.mark.parametrize(
    ("allowed", "own", "peers", "client", "server_key", "gets_in"),
    [
        (None, "a", "b.public", "b", "a.public", True),
        (None, "a", "b+c", "c", "a.public", True),
        (None, "a", "b.public", "c", "a.public", False),
        (None, "a", "b.public", "a", "a.public", False),
        (None, "a", "b.public", "b", "c.public", False),
        (None, "a", "b.public", None, None, False),
        (LOOPBACK, None, None, None, None, True),
        (ELSEWHERE, None, None, None, None, False),
        (ELSEWHERE, "a", "b.public", "b", "a.public", False),
        (LOOPBACK, None, None, "b", "a.public", False),
    ],
)
def test_only_known_keys_from_allowed_addresses_get_in(
    doors: list[Door],
    keys: Path,
    allowed: AllowedPeers | None,
    own: str | None,
    peers: str | None,
    client: str | None,
    server_key: str | None,
    gets_in: bool,
) -> None:
    doors.append(Door(allowed, read(keys, own, peers)))
    assert doors[0].knock(read(keys, client, server_key)) is gets_in


def test_keys_taken_back_do_not_get_in_again(doors: list[Door], keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    allowed = keys / "allowed"
    allowed.write_text((keys / "b+c").read_text())
    doors.append(Door(None, read(keys, "a", "allowed")))
    client = read(keys, "c", "a.public")
    assert doors[0].knock(client)
    allowed.write_text((keys / "b.public").read_text())
    assert not doors[0].knock(client)
    assert not doors[0].knock(client)
    assert doors[0].knock(read(keys, "b", "a.public"))
    refusals = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert refusals == ["a connection was refused: 127.0.0.1 has none of the keys that are allowed"]


def test_context_ends_also_when_it_is_destroyed() -> None:
    door = Door(LOOPBACK, None)
    assert door.knock(None)
    door.context.destroy(linger=0)
    assert door.context.closed
