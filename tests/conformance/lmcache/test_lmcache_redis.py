"""LMCache over a real redis-server: what travels, what a full, stopped, killed or restarted server costs."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

pytest.importorskip("lmcache.v1.cache_engine", reason="lmcache is not installed here: make test-lmcache runs these")

import redis

from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.connectors.testing.targets.redis_process import RedisProcess
from pdserve.kv_layout import BlockHasher

S = TINY_SPEC.block_size
NUMBERS = itertools.count()
PROMPT = list(range(100, 100 + 4 * S + 1))


@pytest.mark.parametrize("length", [1, S, 40 * S + 3])
def test_a_whole_prompt_travels(make_engine: Any, server: RedisProcess, length: int) -> None:
    prompt = list(range(length))
    assert make_engine("prefill", url=server.url).send("p", prompt)
    decode = make_engine("decode", url=server.url)
    assert decode.load("d", prompt) == length
    assert decode.stats.failures == {}


def test_a_damaged_value_is_a_miss_and_the_engine_that_saw_it_heals_it(make_engine: Any, server: RedisProcess) -> None:
    prefill = make_engine("prefill", url=server.url)
    prefill.send("p", PROMPT)
    digest = BlockHasher(prefill.context.identity.fingerprint).block_keys(PROMPT, S)[2].hex
    with redis.Redis(unix_socket_path=str(server.unix_path)) as client:
        (name,) = client.keys(f"*@{int(digest, 16):x}@uint8kv_bytes")
        client.setrange(name, 100, b"damage")
    decode = make_engine("decode", url=server.url)
    assert decode.load("d", PROMPT) == 2 * S
    assert decode.stats.failures == {"corrupt": 1}
    assert prefill.load("q", PROMPT) == 2 * S
    prefill.finish("q")
    prefill.send("r", PROMPT)
    assert decode.load("e", PROMPT) == len(PROMPT)


def test_a_full_server_is_a_counted_failure(make_engine: Any, server: RedisProcess) -> None:
    prefill = make_engine("prefill", url=server.url)
    prefill.send("p", PROMPT)
    with redis.Redis(unix_socket_path=str(server.unix_path)) as client:
        client.config_set("maxmemory", 1)
        assert not prefill.send("q", list(range(3 * S)))
        assert prefill.stats.failures == {"no_space": 3}
        client.config_set("maxmemory", 0)
    prefill.step_until(lambda: prefill.send(f"r{next(NUMBERS)}", list(range(3 * S))))


def test_a_server_that_is_gone_costs_nothing_but_computing_and_comes_back(
    make_engine: Any, server: RedisProcess
) -> None:
    prefill, decode = make_engine("prefill", url=server.url), make_engine("decode", url=server.url)
    prefill.send("p", PROMPT)
    decode.submit("d", PROMPT)
    promised = decode.lookup("d").num_tokens
    server.kill()
    decode.admit("d", promised)
    decode.step_until(lambda: "d" in decode.received)
    assert decode.received["d"] == 0
    decode.submit("e", PROMPT)
    assert decode.lookup("e").num_tokens == 0
    assert not prefill.send("q", PROMPT)
    server.start()
    prefill.step_until(lambda: prefill.send(f"r{next(NUMBERS)}", PROMPT))
    assert decode.load("f", PROMPT) == len(PROMPT)


def test_a_server_that_does_not_answer_costs_a_bounded_time(make_engine: Any, server: RedisProcess) -> None:
    options = {"url": server.url, "timeout_s": 0.2, "lookup_timeout_s": 0.1}
    prefill, decode = make_engine("prefill", **options), make_engine("decode", **options)
    prefill.send("p", PROMPT)
    decode.submit("d", PROMPT)
    promised = decode.lookup("d").num_tokens
    assert promised == len(PROMPT)
    with server.stopped():
        began = time.monotonic()
        decode.admit("d", promised)
        decode.step_until(lambda: "d" in decode.received)
        assert decode.received["d"] == 0
        assert set(decode.stats.failures) == {"timeout"}
        decode.submit("e", PROMPT)
        assert decode.lookup("e").num_tokens == 0
        assert not prefill.send("q", list(range(3 * S)))
        assert time.monotonic() - began < 5
    prefill.step_until(lambda: prefill.send(f"r{next(NUMBERS)}", list(range(3 * S))))
    decode.step_until(lambda: decode.load(f"f{time.monotonic()}", PROMPT) == len(PROMPT))


def test_closing_returns_though_lmcaches_own_way_hangs(make_engine: Any, server: RedisProcess) -> None:
    engine = make_engine("prefill", url=server.url)
    engine.send("p", PROMPT)
    began = time.monotonic()
    engine.close()
    assert time.monotonic() - began < 4
