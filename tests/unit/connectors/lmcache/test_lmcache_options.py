"""What users may write, and what they are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache.v1.cache_engine", reason="lmcache is not installed here: make test-lmcache runs these")

from pdserve.connectors.lmcache.options import LMCacheOptions, Remote, parse_options
from pdserve.connectors.testing import build_context
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.errors import ConfigError
from pdserve.protocol import Role


def parse(**options: Any) -> LMCacheOptions:
    return parse_options(build_context(Role.PREFILL, options))


def test_defaults() -> None:
    options = parse(url="fs:///kv")
    assert options.url == Remote("fs", "/kv")
    assert (options.cpu_cache, options.max_cpu_bytes, options.local_disk_path) == (True, 256 << 20, None)


def test_everything_can_be_set() -> None:
    options = parse(
        url="redis://kv.example:6380/2",
        cpu_cache="false",
        max_cpu_bytes="64MiB",
        local_disk_path="/tier",
        max_local_disk_bytes="1GiB",
        timeout_s="3",
        lookup_timeout_s=0.1,
        reader_threads=4,
    )
    assert options.url == Remote("redis", "redis://kv.example:6380/2")
    assert (options.max_cpu_bytes, options.max_local_disk_bytes) == (64 << 20, 1 << 30)
    assert (options.local_disk_path, options.cpu_cache, options.timeout_s) == (Path("/tier"), False, 3.0)
    assert options.num_calls == 4 + 1 + 2


def test_a_unix_socket_is_redis() -> None:
    assert parse(url="unix:///run/redis.sock").url == Remote("redis", "unix:///run/redis.sock")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "option url is missing"),
        ({"url": "/kv"}, "give fs:///directory, redis://host:port/db or unix:///socket"),
        ({"url": "fs://host/kv"}, "give fs:///directory"),
        ({"url": "fs:///"}, "give fs:///directory"),
        ({"url": "s3://bucket"}, "give fs:///directory"),
        ({"url": "redis://"}, "give fs:///directory"),
        ({"url": "fs:///a,/b"}, "give one"),
        ({"url": "resp://host:1"}, "may wait for ever"),
        ({"url": "lm://host:1"}, "confirms no write"),
        ({"url": "fs:///kv", "max_cpu_bytes": 5000}, "below what transfers need: 16 blocks"),
        ({"url": "fs:///kv", "max_cpu_bytes": 20000, "reader_threads": 64}, "201 blocks"),
        ({"url": "fs:///kv", "max_staging_bytes": 1}, "max_staging_bytes=1"),
        ({"url": "fs:///kv", "max_local_disk_bytes": 1}, "max_local_disk_bytes=1"),
        ({"url": "fs:///kv", "timeout_s": 0}, "timeout_s must be above 0"),
        ({"url": "fs:///kv", "lookup_timeout_s": 0}, "lookup_timeout_s must be above 0"),
        ({"url": "fs:///kv", "chunk_size": 256}, "option 'chunk_size' is unknown"),
    ],
)
def test_what_is_wrong_is_said(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="connector lmcache") as caught:
        parse(**options)
    assert message in str(caught.value)


def test_a_password_in_the_url_is_refused_without_being_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(url="redis://user:secret-word@host:6379")
    assert "secret-word" not in str(caught.value)


def test_the_least_memory_is_enough() -> None:
    value_bytes = TINY_SPEC.block_bytes + 80
    assert parse(url="fs:///kv", max_cpu_bytes=16 * value_bytes).max_cpu_bytes == 16 * value_bytes
