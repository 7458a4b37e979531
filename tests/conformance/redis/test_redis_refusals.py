"""A server that answers, and refuses: each time prompts are computed, and it comes back by itself."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from pdserve.connectors.testing import EngineHarness
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.connectors.testing.targets.redis_process import RedisProcess
from pdserve.errors import ConfigError
from pdserve.kv_layout import KVCacheSpec

S = TINY_SPEC.block_size
PROMPT = list(range(4 * S + 1))
SPEC = KVCacheSpec(num_layers=8, num_kv_heads=4, head_dim=64, block_size=16, dtype="bfloat16")
LONG_PROMPT = list(range(24 * SPEC.block_size))
RIGHTS = {"prefill": ("strlen", "getrange", "expire", "exists", "set"), "decode": ("strlen", "getrange", "expire")}


@pytest.fixture
def client(server: RedisProcess) -> Iterator[redis.Redis]:
    client = redis.Redis(unix_socket_path=str(server.unix_path))
    yield client
    client.close()


def repeat_until(action: Callable[[int], bool], timeout_s: float = 30.0) -> None:
    """As traffic does: again and again, until it works."""
    deadline = time.monotonic() + timeout_s
    attempt = 0
    while not action(attempt):
        assert time.monotonic() < deadline, "it did not come back by itself"
        attempt += 1


def test_a_server_that_has_become_a_replica(make_engine, client: redis.Redis) -> None:
    """It gives what it has and takes nothing, until it is promoted."""
    prefill, decode = make_engine(), make_engine("decode")
    assert prefill.send("before", PROMPT)
    client.replicaof("127.0.0.1", "1")
    try:
        assert not prefill.send("replica", [1, *PROMPT])
        assert prefill.stats.failures == {"moved": 5}
        assert decode.load("d", PROMPT) == len(PROMPT)
        assert decode.stats.failures == {}
    finally:
        client.replicaof("NO", "ONE")
    repeat_until(lambda i: prefill.send(f"promoted-{i}", [1, *PROMPT]))


def test_a_server_that_cannot_persist_takes_nothing_and_gives_what_it_has(make_engine, client: redis.Redis) -> None:
    prefill, decode = make_engine(), make_engine("decode")
    assert prefill.send("before", PROMPT)
    client.config_set("min-replicas-to-write", 1)  # refuses like -MISCONF: every write, also EXPIRE
    try:
        assert not prefill.send("refused", [1, *PROMPT])
        assert decode.load("d", PROMPT) == len(PROMPT)
    finally:
        client.config_set("min-replicas-to-write", 0)
    repeat_until(lambda i: prefill.send(f"again-{i}", [1, *PROMPT]))


def test_a_server_that_runs_a_script(make_engine, run_server) -> None:
    server = run_server("--lua-time-limit", "1")
    prefill, decode = make_engine(url=server.url), make_engine("decode", url=server.url)
    assert prefill.send("before", PROMPT)
    impatient = redis.Redis(unix_socket_path=str(server.unix_path), socket_timeout=0.1)
    with contextlib.suppress(redis.RedisError):
        impatient.eval("while true do end", 0)
    impatient.close()
    assert not prefill.send("busy", [1, *PROMPT])
    assert set(prefill.stats.failures) == {"unreachable"}
    assert decode.load("busy", PROMPT) == 0
    client = redis.Redis(unix_socket_path=str(server.unix_path))
    client.script_kill()
    client.close()
    repeat_until(lambda i: prefill.send(f"again-{i}", [1, *PROMPT]))


def load_and_finish(decode: EngineHarness, name: str) -> int:
    num_tokens = decode.load(name, LONG_PROMPT)
    decode.finish(name)
    return num_tokens


def test_connections_closed_for_their_output(make_engine, run_server) -> None:
    """The server closes them in the middle of a load, for it was asked for more than it likes to have under way."""
    server = run_server()
    options = {"url": server.url, "spec": SPEC, "num_blocks": 64}
    prefill, decode = make_engine(**options), make_engine("decode", **options)
    assert prefill.send("p", LONG_PROMPT)
    client = redis.Redis(unix_socket_path=str(server.unix_path))
    client.config_set("client-output-buffer-limit", "normal 1 0 0")
    assert load_and_finish(decode, "closed") == 0
    assert set(decode.stats.failures) == {"unreachable"}
    client.config_set("client-output-buffer-limit", "normal 0 0 0")
    client.close()
    repeat_until(lambda i: load_and_finish(decode, f"again-{i}") == len(LONG_PROMPT))


def test_a_user_without_a_right_is_told_at_start(make_engine, run_server, tmp_path: Path) -> None:
    """Of those that the role needs, and no other."""
    (tmp_path / "password").write_text("secret")
    server = run_server()
    client = redis.Redis(unix_socket_path=str(server.unix_path))
    options = {"url": server.url, "username": "serve", "password_file": str(tmp_path / "password")}

    def allow(*commands: str) -> None:
        client.acl_setuser("serve", enabled=True, passwords="+secret", keys="*", commands=["-@all", *commands])

    for role, names in RIGHTS.items():
        needed = [f"+{name}" for name in (*names, "unlink")]
        for missing in needed:
            allow(*(name for name in needed if name != missing))
            with pytest.raises(ConfigError, match=rf"refuses: NOPERM .*{missing[1:]}"):
                make_engine(role, **options)
        allow(*needed)
        make_engine(role, **options)
    client.close()


def test_a_right_that_is_lost(make_engine, run_server, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret")
    server = run_server()
    client = redis.Redis(unix_socket_path=str(server.unix_path))
    client.acl_setuser("serve", enabled=True, passwords="+secret", keys="*", commands=["+@all"])
    options = {"url": server.url, "username": "serve", "password_file": str(tmp_path / "password")}
    prefill, decode = make_engine(**options), make_engine("decode", **options)
    client.acl_setuser("serve", enabled=True, commands=["-getrange", "-set"])
    assert not prefill.send("lost", PROMPT)
    assert prefill.stats.failures == {"permission": 5}
    client.acl_setuser("serve", enabled=True, commands=["+set"])
    repeat_until(lambda i: prefill.send(f"p-{i}", PROMPT))
    assert decode.load("lost", PROMPT) == 0
    assert decode.stats.failures == {"permission": 1}
    client.acl_setuser("serve", enabled=True, commands=["+getrange"])
    assert decode.load("back", PROMPT) == len(PROMPT)
    client.close()


def test_a_socket_with_a_space_in_its_path(make_engine, server: RedisProcess, tmp_path: Path) -> None:
    link = tmp_path / "my redis"
    link.symlink_to(server.directory)
    url = f"unix://{link}/{server.unix_path.name}"
    assert make_engine(url=url).send("p", PROMPT)
    assert make_engine("decode", url=url).load("d", PROMPT) == len(PROMPT)
