"""Blocks through a real server: what comes back is what went in, or a counted failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest
import redis

from pdserve.connectors.base import MatchResult
from pdserve.connectors.blocks.block_format import HEADER_BYTES
from pdserve.connectors.testing import EngineHarness
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.connectors.testing.targets.redis_process import RedisProcess
from pdserve.kv_layout import BlockHasher

S = TINY_SPEC.block_size
PROMPT = list(range(4 * S + 1))
BAD = 2
VALUE_BYTES = HEADER_BYTES + TINY_SPEC.block_bytes


@pytest.fixture
def client(server: RedisProcess) -> Iterator[redis.Redis]:
    client = redis.Redis(unix_socket_path=str(server.unix_path))
    yield client
    client.close()


def name_of(engine: EngineHarness, index: int = BAD, prompt: list[int] = PROMPT) -> str:
    fingerprint = engine.context.identity.fingerprint
    return f"pdserve:kv:{fingerprint}:{BlockHasher(fingerprint).block_keys(prompt, S)[index].hex}"


def load_damaged(decode: EngineHarness, damage: Callable[[], object], name: str = "d") -> int:
    """Damage the store between lookup and load; the tokens that arrived."""
    decode.submit(name, PROMPT)
    match = decode.lookup(name)
    assert match.num_tokens == len(PROMPT)
    decode.admit(name, match.num_tokens)
    damage()
    decode.step_until(lambda: name in decode.received)
    return decode.received[name]


@pytest.mark.parametrize("chunk", [None, 1, 3, 4, 7])
@pytest.mark.parametrize("batch_bytes", [1, 2 * VALUE_BYTES, 4 << 20])
def test_a_prompt_in_chunks_comes_back_whole(make_engine, chunk: int | None, batch_bytes: int) -> None:
    prefill, decode = make_engine(max_batch_bytes=batch_bytes), make_engine("decode", max_batch_bytes=batch_bytes)
    assert prefill.send("p", PROMPT, chunk=chunk)
    assert decode.load("d", PROMPT) == len(PROMPT)
    assert prefill.stats.num_blocks_saved == decode.stats.num_blocks_loaded == 5
    assert prefill.stats.failures == decode.stats.failures == {}


def test_local_tokens_are_not_counted_and_a_prefix_is_found(make_engine) -> None:
    prefill, decode = make_engine(), make_engine("decode")
    prefill.send("p", PROMPT)
    assert decode.load("d", [*PROMPT[: 2 * S], 99, 98, 97, 96, 95], num_local_tokens=S) == S
    decode.submit("e", PROMPT)
    assert decode.lookup("e", len(PROMPT)) == MatchResult(0)
    assert decode.lookup("e", S + 1) == MatchResult(0)


def test_what_is_there_is_not_sent_again(make_engine, client: redis.Redis) -> None:
    prefill = make_engine()
    assert prefill.send("p", PROMPT)
    num_sent = client.info("commandstats")["cmdstat_set"]["calls"]
    assert prefill.send("again", PROMPT)
    assert client.info("commandstats")["cmdstat_set"]["calls"] == num_sent
    assert prefill.stats.num_blocks_saved == 5


def test_ttl_runs_from_the_last_use(make_engine, client: redis.Redis) -> None:
    prefill, decode = make_engine(ttl_s=1000), make_engine("decode", ttl_s=2000)

    def lives() -> list[float]:
        return [client.ttl(name_of(prefill, index)) for index in range(5)]

    prefill.send("p", PROMPT)
    assert all(900 < life <= 1000 for life in lives())
    decode.load("d", PROMPT)
    assert all(1900 < life <= 2000 for life in lives())
    prefill.send("all there", PROMPT)
    assert all(900 < life <= 1000 for life in lives())
    assert decode.load("e", PROMPT) == len(PROMPT)
    client.delete(name_of(prefill, 2))
    prefill.send("one gone", PROMPT)
    assert all(900 < life <= 1000 for life in lives())


def test_without_ttl_blocks_stay(make_engine, client: redis.Redis) -> None:
    prefill, decode = make_engine(ttl_s=0), make_engine("decode", ttl_s=0)
    prefill.send("p", PROMPT)
    assert decode.load("d", PROMPT) == len(PROMPT)
    assert client.ttl(name_of(prefill)) == -1


def test_salt_model_and_dtype_never_meet(make_engine) -> None:
    make_engine().send("p", PROMPT)
    assert make_engine("decode").load("d", PROMPT, salt="other") == 0
    assert make_engine("decode", weights="weights-2").load("d", PROMPT) == 0
    assert make_engine("decode", spec=msgspec.structs.replace(TINY_SPEC, dtype="float32")).load("d", PROMPT) == 0
    assert make_engine("decode", prefix="elsewhere").load("d", PROMPT) == 0


@pytest.mark.parametrize(
    ("offset", "kind"),
    [
        *((offset, "corrupt") for offset in (0, 72, HEADER_BYTES, VALUE_BYTES - 1)),
        *((offset, "foreign") for offset in (8, 12, 16, 32, 48, 64)),
    ],
)
def test_a_flipped_bit_is_found_wherever_it_is(make_engine, client: redis.Redis, offset: int, kind: str) -> None:
    prefill, decode = make_engine(), make_engine("decode")
    prefill.send("p", PROMPT)
    name = name_of(prefill)
    byte = client.getrange(name, offset, offset)[0]
    assert load_damaged(decode, lambda: client.setrange(name, offset, bytes([byte ^ 1]))) == BAD * S
    assert decode.stats.failures == {kind: 1}
    assert not client.exists(name)
    assert prefill.send("again", PROMPT)
    assert decode.load("d2", PROMPT) == len(PROMPT)


@pytest.mark.parametrize("length", [1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, VALUE_BYTES - 1])
def test_a_truncated_value_is_a_reported_failure_and_then_a_miss(make_engine, client, length: int) -> None:
    prefill, decode = make_engine(), make_engine("decode")
    prefill.send("p", PROMPT)
    name = name_of(prefill)
    value = client.get(name)
    assert load_damaged(decode, lambda: client.set(name, value[:length])) == BAD * S
    assert decode.stats.failures == {"truncated": 1}
    client.set(name, value[:length])
    assert decode.load("d2", PROMPT) == BAD * S


def test_a_value_that_is_too_long_is_corrupt(make_engine, client: redis.Redis) -> None:
    prefill, decode = make_engine(), make_engine("decode")
    prefill.send("p", PROMPT)
    assert load_damaged(decode, lambda: client.append(name_of(prefill), bytes(1 << 20))) == BAD * S
    assert decode.stats.failures == {"corrupt": 1}


def test_another_blocks_value_is_foreign_and_does_not_stay_in_memory(make_engine, client: redis.Redis) -> None:
    prefill, decode = make_engine(), make_engine("decode")
    prefill.send("p", PROMPT)
    decode.submit("d", PROMPT)
    block_ids = decode.admit("d", decode.lookup("d").num_tokens or 0)
    client.copy(name_of(prefill, 1), name_of(prefill), replace=True)
    decode.step_until(lambda: "d" in decode.received)
    assert decode.received["d"] == BAD * S
    assert decode.stats.failures == {"foreign": 1}
    assert not decode.read_block(block_ids[BAD]).any()


def test_evicted_between_lookup_and_load(make_engine, client: redis.Redis) -> None:
    prefill, decode = make_engine(), make_engine("decode")
    prefill.send("p", PROMPT)
    assert load_damaged(decode, lambda: client.delete(name_of(prefill))) == BAD * S
    assert decode.stats.failures == {"missing": 1}
    assert decode.lookup("d") == MatchResult(0)  # what could not be read once is computed


def test_a_key_that_holds_no_string_is_a_miss_and_is_written_over(make_engine, client: redis.Redis) -> None:
    prefill, decode = make_engine(), make_engine("decode")
    client.lpush(name_of(prefill), "x")
    assert decode.load("d", PROMPT) == 0
    assert prefill.send("p", PROMPT)

    def replace() -> None:
        client.delete(name_of(prefill))
        client.lpush(name_of(prefill), "x")

    assert load_damaged(decode, replace, "d2") == BAD * S
    assert decode.stats.failures == {"io": 1}


def test_an_abort_during_a_load(make_engine) -> None:
    prefill, decode = make_engine(), make_engine("decode")
    prefill.send("p", PROMPT)
    for number in range(50):
        decode.submit(f"d{number}", PROMPT)
        decode.admit(f"d{number}", decode.lookup(f"d{number}").num_tokens or 0)
        if number % 2:
            decode.step()
        decode.finish(f"d{number}")
        decode.step_until(lambda: decode.is_idle)
    assert decode.num_used_blocks == 0
    assert decode.scheduler._index._questions == {}


def test_a_request_that_ends_while_it_is_looked_up(make_engine) -> None:
    decode = make_engine("decode")
    request = decode.submit("d", PROMPT)
    assert decode.scheduler.get_num_new_matched_tokens(request, 0) == MatchResult(None)
    decode.finish("d")
    assert decode.scheduler._index._questions == {}
