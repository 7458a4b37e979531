from __future__ import annotations

import os
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from pdserve.errors import ConfigError
from pdserve.peers.curve import Curve, UnknownPeerError, read_curve
from pdserve.peers.curve_keys import make_key_pair, read_key_file, read_key_pair

KEY = "ab" * 32


def build_curve(directory: Path, own: str, peers: str) -> Curve:
    curve = read_curve(str(directory / own), str(directory / peers))
    assert curve is not None
    return curve


def test_pair_is_read_as_it_was_written_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        secret, public = make_key_pair("router", tmp_path)
    finally:
        os.umask(before)
    assert [path.name for path in (secret, public)] == ["router.secret", "router.public"]
    assert secret.stat().st_mode & 0o777 == 0o600
    pair = read_key_pair(secret, "--x")
    assert read_key_file(public, "--x") == {"router": pair.public}
    assert z85.decode(zmq.curve_public(z85.encode(pair.secret))) == pair.public
    assert pair.secret.hex() not in public.read_text()


def test_keys_that_are_there_are_never_overwritten(tmp_path: Path) -> None:
    secret, _ = make_key_pair("router", tmp_path)
    content = secret.read_text()
    with pytest.raises(ConfigError, match=r"router\.secret: File exists"):
        make_key_pair("router", tmp_path)
    assert secret.read_text() == content
    with pytest.raises(ConfigError, match="No such file"):
        make_key_pair("router", tmp_path / "none")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it holds no key"),
        ("# only this", "it holds no key"),
        (f"a {KEY}\nb", "line 2 is not of the form NAME KEY"),
        (f"a {KEY[1:]}", "line 1 is not of the form NAME KEY"),
        (f"a {KEY} more", "line 1 is not of the form NAME KEY"),
        (f"a {KEY}\n\na {KEY}", "line 3 names a again"),
    ],
)
def test_what_is_no_key_file_is_named(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(ConfigError, match=f"--x .*keys: {message}") as caught:
        read_key_file(path, "--x")
    assert "abab" not in str(caught.value)


def test_secret_key_that_others_may_read_is_refused(tmp_path: Path) -> None:
    secret, _ = make_key_pair("router", tmp_path)
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="others may read it; chmod 600 it"):
        read_key_pair(secret, "--x")
    secret.chmod(0o640)
    assert read_key_pair(secret, "--x")
    (tmp_path / "two").write_text(f"a {KEY}\nb {KEY}\n")
    with pytest.raises(ConfigError, match="it holds 2 keys"):
        read_key_pair(tmp_path / "two", "--x")


def test_settings_come_together_or_not_at_all(tmp_path: Path) -> None:
    secret, public = make_key_pair("router", tmp_path)
    assert read_curve(None, None) is None
    for settings in ((str(secret), None), (None, str(public))):
        with pytest.raises(ConfigError, match="--curve-secret-key and --curve-peer-keys belong together"):
            read_curve(*settings)


def test_peers_are_found_by_address_then_host_then_as_the_only_one(tmp_path: Path) -> None:
    make_key_pair("me", tmp_path)
    peers = tmp_path / "peers"
    first, second, third = (digit * 64 for digit in "123")
    peers.write_text(f"10.0.0.5:8100 {first}\n10.0.0.5 {second}\n[::1] {third}\n")
    keys = build_curve(tmp_path, "me.secret", "peers").peers
    found = [keys.get_key(address).hex() for address in ("10.0.0.5:8100", "10.0.0.5:8200", "[::1]:1")]
    assert found == [first, second, third]
    with pytest.raises(UnknownPeerError, match=r"has no key called 10\.0\.0\.6:1 or 10"):
        keys.get_key("10.0.0.6:1")
    peers.write_text(f"instances {first}\n")
    assert keys.get_key("10.0.0.6:1").hex() == first


def test_peers_change_with_their_file_and_mistakes_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_key_pair("me", tmp_path)
    peers = tmp_path / "peers"
    first, second = (digit * 64 for digit in "12")
    peers.write_text(f"a {first}\n")
    keys = build_curve(tmp_path, "me.secret", "peers").peers
    assert keys.find_name(bytes.fromhex(first)) == "a"
    assert keys.find_name(bytes.fromhex(second)) is None
    peers.write_text(f"a {first}\nb {second}\n")
    assert keys.find_name(bytes.fromhex(second)) == "b"
    peers.write_text("half a li")
    assert [keys.find_name(bytes.fromhex(key)) for key in (first, second, first)] == ["a", "b", "a"]
    assert sum("not read again" in record.getMessage() for record in caplog.records) == 1
    peers.write_text(f"b {second}\n")
    assert keys.find_name(bytes.fromhex(first)) is None
