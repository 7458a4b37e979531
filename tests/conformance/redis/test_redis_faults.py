"""A server that is slow, full, restarting or gone: a bounded wait, then prompts are computed; it comes back."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import redis

from pdserve.connectors.base import MatchResult
from pdserve.connectors.testing import EngineHarness
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.connectors.testing.targets.redis_process import RedisProcess
from pdserve.errors import ConfigError
from pdserve.kv_layout import KVCacheSpec

S = TINY_SPEC.block_size
PROMPT = list(range(4 * S + 1))
QUICK = {"timeout_s": 0.3, "lookup_timeout_s": 0.2}


def repeat_until(action: Callable[[int], bool], timeout_s: float = 60.0) -> None:
    """As traffic does: again and again, until it works."""
    deadline = time.monotonic() + timeout_s
    attempt = 0
    while not action(attempt):
        assert time.monotonic() < deadline, "it did not come back by itself"
        attempt += 1


def send_and_load(prefill: EngineHarness, decode: EngineHarness, tag: str) -> None:
    repeat_until(lambda i: prefill.send(f"p-{tag}-{i}", PROMPT))
    repeat_until(lambda i: load_and_finish(decode, f"d-{tag}-{i}") == len(PROMPT))


def load_and_finish(decode: EngineHarness, name: str) -> int:
    num_tokens = decode.load(name, PROMPT)
    decode.finish(name)
    return num_tokens


def test_killed_and_restarted(make_engine, server: RedisProcess, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever asks a server that is gone is told so at once: no deadline has a part in it."""
    prefill, decode = make_engine(), make_engine("decode")
    send_and_load(prefill, decode, "before")
    decode.submit("caught", PROMPT)
    decode.admit("caught", decode.lookup("caught").num_tokens or 0)
    server.kill()
    decode.step_until(lambda: "caught" in decode.received)
    assert decode.received["caught"] == 0
    assert decode.stats.failures == {"unreachable": 1}
    assert not prefill.send("gone", [7, *PROMPT])
    assert prefill.stats.failures == {"unreachable": 5}
    assert decode.load("gone", PROMPT) == 0
    server.start()
    send_and_load(prefill, decode, "after")
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 3  # one each for load, save and lookup
    assert all(server.url in text or "could not be loaded" in text for text in warnings)


def test_asleep(make_engine, server: RedisProcess) -> None:
    prefill, decode = make_engine(**QUICK), make_engine("decode", **QUICK)
    send_and_load(prefill, decode, "before")
    decode.submit("caught", PROMPT)
    decode.admit("caught", decode.lookup("caught").num_tokens or 0)
    with server.stopped():
        began = time.monotonic()
        decode.step_until(lambda: "caught" in decode.received)
        assert decode.received["caught"] == 0
        assert decode.stats.failures == {"timeout": 1}
        request = decode.submit("next", PROMPT)
        assert decode.scheduler.get_num_new_matched_tokens(request, 0) == MatchResult(None)
        assert decode.lookup("next") == MatchResult(0)
        assert not prefill.send("next", [8, *PROMPT])
        assert set(prefill.stats.failures) == {"timeout"}
        assert time.monotonic() - began < 9.0  # other engines here wait for 10 s
    send_and_load(prefill, decode, "after")


def test_the_scheduler_never_waits(make_engine, server: RedisProcess) -> None:
    decode = make_engine("decode", **QUICK)
    with server.stopped():
        began = time.monotonic()
        for number in range(50):
            request = decode.submit(f"d{number}", PROMPT)
            decode.scheduler.get_num_new_matched_tokens(request, 0)
            decode.finish(f"d{number}")
        assert time.monotonic() - began < 50 * QUICK["lookup_timeout_s"] / 2


def test_a_load_that_takes_too_long_ends_with_what_has_come(make_engine, server: RedisProcess) -> None:
    """The deadline passes while the server answers in time for every batch."""
    prefill, decode = make_engine(), make_engine("decode", max_batch_bytes=1, reader_threads=1, load_timeout_s=0)
    prefill.send("p", PROMPT)
    assert decode.load("d", PROMPT) == 0
    assert decode.stats.failures == {"timeout": 1}


def test_no_server_at_start_is_no_error(make_engine, run_server, caplog: pytest.LogCaptureFixture) -> None:
    server = run_server()
    server.kill()
    prefill, decode = make_engine(url=server.url, **QUICK), make_engine("decode", url=server.url, **QUICK)
    assert "cannot be used now" in caplog.text
    assert not prefill.send("p", PROMPT)
    assert decode.load("d", PROMPT) == 0
    server.start()
    send_and_load(prefill, decode, "after")


def test_full(make_engine, server: RedisProcess) -> None:
    """Nothing may be evicted and nothing fits: a counted failure; it takes blocks again when there is room."""
    prefill, decode = make_engine(**QUICK), make_engine("decode", **QUICK)
    send_and_load(prefill, decode, "before")
    client = redis.Redis(unix_socket_path=str(server.unix_path))
    client.config_set("maxmemory", 1)
    assert not prefill.send("full", [9, *PROMPT])
    assert prefill.stats.failures == {"no_space": 5}
    assert decode.load("full", [9, *PROMPT]) == 0
    assert decode.load("old", PROMPT) == len(PROMPT)
    client.config_set("maxmemory", 0)
    client.close()
    repeat_until(lambda i: prefill.send(f"room-{i}", [9, *PROMPT]))


def test_a_prompt_larger_than_the_server_is_not_offered(make_engine, run_server) -> None:
    """Every write succeeds, and evicts a block written before."""
    spec = KVCacheSpec(num_layers=8, num_kv_heads=4, head_dim=64, block_size=16, dtype="bfloat16")
    server = run_server("--maxmemory", "6mb", "--maxmemory-policy", "allkeys-lru")
    prefill = make_engine(url=server.url, spec=spec, num_blocks=128)
    assert prefill.send("small", list(range(1000, 1000 + 8 * spec.block_size)))
    assert prefill.stats.failures == {}
    assert not prefill.send("large", list(range(100 * spec.block_size)))
    assert prefill.stats.failures == {"evicted": 1}
    assert prefill.stats.num_blocks_saved == 108


def test_a_server_that_evicts_takes_everything_and_gives_what_is_left(make_engine, run_server) -> None:
    spec = KVCacheSpec(num_layers=8, num_kv_heads=4, head_dim=64, block_size=16, dtype="bfloat16")
    server = run_server("--maxmemory", "8mb", "--maxmemory-policy", "allkeys-random")
    prefill, decode = (make_engine(role, url=server.url, spec=spec, num_blocks=8) for role in ("prefill", "decode"))
    prompts = [[number] * 33 for number in range(40)]
    are_offered = [prefill.send(f"p{number}", prompt) for number, prompt in enumerate(prompts)]
    assert are_offered.count(True) > 20
    # The others lost a block to their own last ones.
    assert prefill.stats.failures.get("evicted", 0) == are_offered.count(False)
    assert set(prefill.stats.failures) <= {"evicted"}
    num_loaded = 0
    for number, prompt in enumerate(prompts):
        num_loaded += decode.load(f"d{number}", prompt)
        decode.finish(f"d{number}")
    assert 0 < num_loaded < 40 * 33


def test_a_wrong_password_is_told_at_start_without_showing_it(make_engine, run_server, tmp_path, caplog) -> None:
    server = run_server("--requirepass", "right-secret")
    (tmp_path / "password").write_text("wrong-secret\n")
    for options in ({}, {"password_file": str(tmp_path / "password")}):
        with pytest.raises(ConfigError, match=r"refuses: .*PDSERVE_REDIS_PASSWORD") as caught:
            make_engine(url=server.url, **options)
        assert "secret" not in caught.value.message + caplog.text


def test_a_password_from_the_environment(make_engine, run_server, monkeypatch, caplog) -> None:
    server = run_server("--requirepass", "right-secret")
    monkeypatch.setenv("PDSERVE_REDIS_PASSWORD", "right-secret")
    prefill, decode = make_engine(url=server.url, **QUICK), make_engine("decode", url=server.url, **QUICK)
    send_and_load(prefill, decode, "x")
    server.kill()
    assert decode.load("gone", PROMPT) == 0
    assert "secret" not in caplog.text
