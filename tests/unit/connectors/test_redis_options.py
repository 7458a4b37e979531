from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pdserve.connectors.redis.options import Address, RedisOptions, parse_options
from pdserve.connectors.testing import build_context
from pdserve.errors import ConfigError
from pdserve.protocol import Role


@pytest.fixture(autouse=True)
def no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDSERVE_REDIS_PASSWORD", raising=False)


def parse(**given: Any) -> RedisOptions:
    return parse_options(build_context(Role.PREFILL, given))


@pytest.mark.parametrize(
    ("url", "address", "place"),
    [
        ("redis://kv.example", Address("kv.example"), "redis://kv.example:6379/0"),
        ("redis://10.0.0.1:7000/2", Address("10.0.0.1", 7000, db=2), "redis://10.0.0.1:7000/2"),
        ("rediss://kv.example:1", Address("kv.example", 1, is_tls=True), "rediss://kv.example:1/0"),
        ("rediss://[::1]:1", Address("::1", 1, is_tls=True), "rediss://[::1]:1/0"),
        ("unix:///run/redis.sock", Address("", unix_path="/run/redis.sock"), "unix:///run/redis.sock"),
        ("unix:///run/a b@c/s", Address("", unix_path="/run/a b@c/s"), "unix:///run/a b@c/s"),
    ],
)
def test_an_address_is_understood_and_shown(url: str, address: Address, place: str) -> None:
    assert parse(url=url).url == address
    assert str(address) == place


@pytest.mark.parametrize(
    ("name", "raw", "message"),
    [
        ("url", "http://kv", "give redis://host:port/db"),
        ("url", "redis://", "give redis://host:port/db"),
        ("url", "unix://host/path", "give redis://host:port/db"),
        ("url", "redis://kv/0#ssl", "give redis://host:port/db"),
        ("url", "redis://kv/x", "the database behind the host is a number"),
        ("url", "redis://kv:99999", "Port out of range"),
        ("url", 5, "give text"),
        ("cluster", "maybe", "give true or false"),
        ("ttl_s", 1.5, "give whole seconds"),
        ("prefix", "", "give text"),
        ("timeout_s", 0, "must be above 0"),
        ("lookup_timeout_s", 0, "must be above 0"),
        ("max_staging_bytes", 100, "is below the 336 bytes of one block"),
        ("tls_ca_file", "/no/such/file", "there is no such file"),
        ("password_file", "/no/such/file", "there is no such file"),
        ("username", "somebody", "needs a password: set PDSERVE_REDIS_PASSWORD"),
        ("passwort", "x", "option 'passwort' is unknown; known: url, cluster"),
    ],
)
def test_what_is_wrong_is_named(name: str, raw: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        parse(**{name: raw})
    assert name in caught.value.message


def test_combinations_that_make_no_sense(tmp_path: Path) -> None:
    (tmp_path / "x.pem").touch()
    pem = str(tmp_path / "x.pem")
    for given, message in (
        ({"cluster": True, "url": "unix:///s"}, "a cluster is reached by TCP"),
        ({"cluster": "true", "url": "redis://kv/1"}, "database 0 only"),
        ({"tls_ca_file": pem}, "tls_ca_file needs a url of the form rediss"),
        ({"tls_cert_file": pem, "url": "rediss://kv"}, "belong together"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse(**given)


def test_secrets_come_from_a_file_or_the_environment_and_are_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDSERVE_REDIS_PASSWORD", "from-env")
    assert parse(username="u").password == "from-env"
    file = tmp_path / "password"
    file.write_text(" from-file\n")
    options = parse(password_file=str(file))
    assert options.password == "from-file"
    assert "from-file" not in repr(options)
    for content in (b"\n", b"\xff\xfe"):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=r"the file is empty|cannot be read"):
            parse(password_file=str(file))


@pytest.mark.parametrize(
    "url",
    [
        "redis://me:secret@kv:1",
        *(f"redis://:{mark}secret{mark}@kv" for mark in "/?#[]@: "),
        "redis://kv/0?password=secret",
        "unix:///run/s?password=secret",
        "unix://me:secret@/run/s",
    ],
)
def test_a_password_in_the_url_is_refused_and_not_repeated(url: str) -> None:
    """Whatever characters it has."""
    with pytest.raises(ConfigError, match="PDSERVE_REDIS_PASSWORD or option password_file") as caught:
        parse(url=url)
    assert "secret" not in caught.value.message
