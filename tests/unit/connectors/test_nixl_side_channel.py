"""Both ends of the side channel over real connections on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nixl")

from pdserve.connectors.nixl import wire
from pdserve.connectors.nixl.options import NixlOptions
from pdserve.connectors.nixl.side_channel import ProducerChannel, ProducerSocket, Sockets
from pdserve.peers.addresses import AllowedPeers
from pdserve.peers.curve import Curve, read_curve
from pdserve.peers.curve_keys import make_key_pair

DEADLINE_MS = 30_000
LOOPBACK = AllowedPeers(["127.0.0.0/8"])


@pytest.fixture
def sockets() -> Iterator[Sockets]:
    made = Sockets()
    yield made
    made.context.destroy(linger=0)


def read(directory: Path, own: str, peer: str) -> Curve | None:
    return read_curve(str(directory / f"{own}.secret"), str(directory / f"{peer}.public"))


def is_heard(sockets: Sockets, options: NixlOptions, curve: Curve | None) -> bool:
    """Whether what a consumer says reaches the producer."""
    producer = ProducerSocket(sockets, options)
    consumer = ProducerChannel(sockets, producer.address, LOOPBACK, curve)
    consumer.send(wire.Cancel("t"))
    while True:
        assert sockets.poller.poll(DEADLINE_MS), "neither heard nor refused"
        if consumer.poll_lost():
            assert list(producer.receive()) == []
            return False
        for sender, message in producer.receive():
            assert message == wire.Cancel("t")
            producer.send(sender, wire.Refused("t", "unknown", "no"))
        if any(answer == wire.Refused("t", "unknown", "no") for answer in consumer.receive()):
            return True


@pytest.mark.parametrize(
    ("producer", "consumer", "heard"),
    [
        (None, None, True),
        (("a", "b"), ("b", "a"), True),
        (("a", "b"), ("c", "a"), False),
        (("a", "b"), ("b", "c"), False),
        (("a", "b"), None, False),
        (None, ("b", "a"), False),
    ],
)
def test_only_engines_with_each_others_keys_speak(
    sockets: Sockets,
    tmp_path: Path,
    producer: tuple[str, str] | None,
    consumer: tuple[str, str] | None,
    heard: bool,
) -> None:
    for name in "abc":
        make_key_pair(name, tmp_path)
    options = NixlOptions(curve=producer and read(tmp_path, *producer))
    assert is_heard(sockets, options, consumer and read(tmp_path, *consumer)) is heard


def test_consumers_from_elsewhere_are_not_heard(sockets: Sockets) -> None:
    assert not is_heard(sockets, NixlOptions(allowed_peers=("10.0.0.0/8",)), None)


def test_producer_without_a_key_is_not_connected_to(sockets: Sockets, tmp_path: Path) -> None:
    make_key_pair("a", tmp_path)
    (tmp_path / "some.public").write_text(f"10.0.0.1 {'1' * 64}\n10.0.0.2 {'2' * 64}\n")
    with pytest.raises(ValueError, match=r"has no key called 127\.0\.0\.1:4711"):
        ProducerChannel(sockets, "tcp://127.0.0.1:4711", LOOPBACK, read(tmp_path, "a", "some"))
