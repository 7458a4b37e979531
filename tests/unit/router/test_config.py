from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from pdserve.errors import ConfigError
from pdserve.router.config import PoolSettings, RouterSettings, check_settings, endpoint_of
from pdserve.router.main import KEEP_ALIVE_S, build_directory
from pdserve.settings import load_settings


def load(*argv: str) -> RouterSettings:
    settings = load_settings(RouterSettings, prog="run-router", description="Test.", argv=argv)
    check_settings(settings)
    return settings


def test_pools_come_from_the_command_line() -> None:
    settings = load("--prefill", "a:1", "--prefill", "b:2", "--decode", "tcp://c:3")
    assert settings.pools == PoolSettings(prefill=["a:1", "b:2"], decode=["tcp://c:3"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prefill", "a:1"], "no decode instance"),
        (["--decode", "a:1", "--prefill", "tcp://a:1"], "tcp://a:1 is given more than once"),
        (["--decode", "nowhere"], "'nowhere' is not of the form HOST:PORT"),
        (["--decode", "a:1", "--heartbeat-timeout-s", "0.5"], "must be above heartbeat_interval_s"),
        (["--decode", "a:1", "--port", "99999"], "65535"),
        (["--decode", "a:1", "--decode-policy", "best"], "least_loaded"),
    ],
)
def test_settings_that_cannot_work_are_refused(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        load(*argv)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "a",
        ":1",
        "a:",
        "a:0",
        "a:65536",
        "a:b",
        "ipc://x",
        "http://a:1",
        "a/b:1",
        "a b:1",
        "-a:1",
        ".:1",
        "::1:1",
        "a:１",
        "a:1\n",
    ],
)
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ConfigError):
        endpoint_of(address)


@pytest.mark.parametrize("address", ["10.0.0.1:80", "tcp://10.0.0.1:80"])
def test_addresses(address: str) -> None:
    assert endpoint_of(address) == "tcp://10.0.0.1:80"


def test_idle_connections_outlast_those_that_clients_keep() -> None:
    keepalive_expiry = httpx.Limits().keepalive_expiry
    assert keepalive_expiry is not None
    assert keepalive_expiry < KEEP_ALIVE_S


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("decode = [", "--instances-file: .*instances.toml"),
        ('decode = "a:1"', "decode must be a list"),
        ('decoders = ["a:1"]', "'decoders' is unknown"),
        ('decode = ["a:b"]', "'a:b' is not of the form HOST:PORT"),
        ('prefill = ["a:1"]\ndecode = ["a:1"]', "a:1 stands there more than once"),
    ],
)
def test_instances_file_that_is_wrong_at_start_is_an_error(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "instances.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        build_directory(PoolSettings(instances_file=str(path)))


@pytest.mark.parametrize("option", ["--tool-call-parser", "--reasoning-parser"])
def test_unknown_parsers_are_refused_with_those_there_are(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} is 'xml'; it may be .*(hermes|think)"):
        load("--decode", "a:1", option, "xml")
