"""Real NIXL between two engines of one process: bytes, ends, and what is refused."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from pdserve.connectors.nixl.reads import ReadQueue
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.errors import ConfigError
from pdserve.kv_layout import KVCacheSpec

S = TINY_SPEC.block_size
PROMPT = list(range(100, 100 + 4 * S + 1))


@pytest.mark.parametrize("length", [1, S - 1, S, S + 1, 2 * S, 9 * S + 3])
def test_a_whole_prompt_travels(make_engine, fetch, transport, length: int) -> None:
    """The harness compares every byte."""
    prefill, decode = make_engine("prefill"), make_engine("decode")
    prompt = list(range(length))
    for index in range(3):
        params = prefill.prefill(f"p{index}", prompt).kv_transfer_params
        assert fetch(decode, f"d{index}", prompt, params, beside=[prefill]) == length
        prefill.step_until(lambda index=index: f"p{index}" in prefill.sent)
    num_blocks = 3 * TINY_SPEC.num_blocks_for(length)
    assert (decode.num_used_blocks, prefill.num_used_blocks) == (0, 0)
    assert (decode.stats.num_blocks_loaded, decode.stats.failures) == (num_blocks, {})
    assert (prefill.stats.num_blocks_saved, prefill.stats.failures) == (num_blocks, {})
    assert all(prefill.sent.values())


@pytest.mark.parametrize("chunk", [1, S + 1, 3 * S])
def test_a_prompt_computed_in_chunks(make_engine, fetch, chunk: int) -> None:
    prefill, decode = make_engine("prefill"), make_engine("decode")
    params = prefill.prefill("p", PROMPT, chunk=chunk).kv_transfer_params
    assert fetch(decode, "d", PROMPT, params, beside=[prefill]) == len(PROMPT)


def test_blocks_of_several_megabytes_arrive_in_pieces(make_engine, fetch, transport) -> None:
    spec = KVCacheSpec(num_layers=4, num_kv_heads=8, head_dim=128, block_size=16, dtype="float32")
    prefill = make_engine("prefill", spec=spec, num_blocks=8)
    decode = make_engine("decode", spec=spec, num_blocks=8)
    prompt = list(range(5 * 16 + 3))
    params = prefill.prefill("p", prompt).kv_transfer_params
    assert fetch(decode, "d", prompt, params, beside=[prefill]) == len(prompt)
    assert decode.stats.num_bytes_loaded == 6 * spec.block_bytes


def test_only_blocks_beyond_local_ones_are_moved(make_engine, fetch) -> None:
    prefill, decode = make_engine("prefill"), make_engine("decode")
    params = prefill.prefill("p", PROMPT).kv_transfer_params
    assert fetch(decode, "d", PROMPT, params, num_local_tokens=3 * S, beside=[prefill]) == S + 1
    prefill.step_until(lambda: "p" in prefill.sent)
    assert (decode.stats.num_blocks_loaded, prefill.stats.num_blocks_saved) == (2, 2)


def test_many_loads_at_once(make_engine, transport) -> None:
    prefill, decode = make_engine("prefill"), make_engine("decode")
    prompts = {f"r{index}": list(range(1000 * index, 1000 * index + 2 * S + index % S)) for index in range(16)}
    for name, prompt in prompts.items():
        params = prefill.prefill(name, prompt).kv_transfer_params
        decode.submit(name, prompt, params=params)
        decode.admit(name, decode.lookup(name).num_tokens or 0)
    prefill.step()
    decode.step_until(lambda: len(decode.received) == len(prompts))
    assert decode.received == {name: len(prompt) for name, prompt in prompts.items()}
    prefill.step_until(lambda: len(prefill.sent) == len(prompts))
    for name in prompts:
        decode.finish(name)
    assert (decode.num_used_blocks, prefill.num_used_blocks) == (0, 0)


def test_a_flipped_bit_is_found_and_what_comes_before_it_counts(make_engine, fetch) -> None:
    prefill, decode = make_engine("prefill"), make_engine("decode")
    block_ids: list[int] = []
    prefill.submit("p", PROMPT)
    block_ids += prefill.admit("p", 0)
    prefill.step({"p": len(PROMPT)})
    params = prefill.finish("p", handoff=True).kv_transfer_params
    prefill.step()
    producer = prefill.worker._producer
    prefill.step_until(lambda: len(producer._checksums) == 1)
    prefill.read_block(block_ids[2])[0, 0, 0] ^= 1
    assert fetch(decode, "d", PROMPT, params) == 2 * S
    assert decode.stats.failures == {"corrupt": 1}
    prefill.step_until(lambda: "p" in prefill.sent)


def test_fifty_aborts_at_every_moment(make_engine, fetch, transport) -> None:
    prefill, decode = make_engine("prefill", num_blocks=256), make_engine("decode", num_blocks=256)
    for index in range(50):
        name = f"r{index}"
        params = prefill.prefill(name, PROMPT).kv_transfer_params
        if index % 3:
            prefill.step()
        decode.submit(name, PROMPT, params=params)
        if index % 5:
            decode.admit(name, decode.lookup(name).num_tokens or 0)
        for _ in range(index % 4):
            decode.step()
        decode.finish(name)
        decode.step()
    decode.step_until(lambda: decode.num_used_blocks == 0)
    prefill.step_until(lambda: prefill.num_used_blocks == 0)
    assert fetch(decode, "last", PROMPT, prefill.prefill("last", PROMPT).kv_transfer_params, beside=[prefill])
    assert decode.stats.failures == {}


def test_a_slow_reader_keeps_its_lease(make_engine, fetch, monkeypatch) -> None:
    """It asks for more of it after a quarter."""
    prefill, decode = make_engine("prefill", lease_s=4.0), make_engine("decode")
    fetch(decode, "first", PROMPT, prefill.prefill("first", PROMPT).kv_transfer_params, beside=[prefill])
    prefill.step_until(lambda: "first" in prefill.sent)
    gate, advance = threading.Event(), ReadQueue.advance
    monkeypatch.setattr(ReadQueue, "advance", lambda queue: gate.wait(0.001) and advance(queue))
    params = prefill.prefill("p", PROMPT).kv_transfer_params
    decode.submit("d", PROMPT, params=params)
    decode.admit("d", decode.lookup("d").num_tokens or 0)
    decode.step()
    prefill.step()
    leases = prefill.worker._producer._leases
    prefill.step_until(lambda: leases.is_read)
    ends_at = leases.next_expiry
    prefill.step_until(lambda: leases.next_expiry > ends_at + 0.5)
    gate.set()
    decode.step_until(lambda: "d" in decode.received)
    prefill.step_until(lambda: "p" in prefill.sent)
    assert (decode.received["d"], prefill.sent) == (len(PROMPT), {"first": True, "p": True})


def test_a_silent_reader_loses_its_lease(make_engine, fetch) -> None:
    prefill, decode = make_engine("prefill", lease_s=0.2), make_engine("decode")
    params = prefill.prefill("p", PROMPT).kv_transfer_params
    prefill.step_until(lambda: "p" in prefill.sent)
    assert (prefill.sent, prefill.num_used_blocks, prefill.stats.failures) == ({"p": False}, 0, {"expired": 1})
    assert fetch(decode, "late", PROMPT, params) == 0
    assert decode.stats.failures == {"expired": 1}


def test_a_cancelled_hand_off_frees_its_blocks_long_before_the_lease_ends(make_engine, fetch) -> None:
    prefill, decode = make_engine("prefill", lease_s=600.0), make_engine("decode")
    params = prefill.prefill("p", PROMPT).kv_transfer_params
    prefill.step()
    prefill.scheduler.cancel_send("p")
    prefill.scheduler.cancel_send("unknown")
    prefill.step_until(lambda: "p" in prefill.sent)
    prefill.scheduler.cancel_send("p")
    prefill.step()
    assert (prefill.num_used_blocks, prefill.sent) == (0, {"p": False})
    assert fetch(decode, "d", PROMPT, params, beside=[prefill]) == 0


def test_reads_step_aside_for_steps_that_compute_and_for_no_others(make_engine) -> None:
    decode = make_engine("decode")
    decode.submit("d", PROMPT)
    decode.admit("d", 0)
    pace = decode.worker._consumer.pace
    for num_tokens in ({}, {"d": S}, {}):
        decode.worker.start_load_kv(decode.build_metadata(num_tokens))
        assert pace.is_computing is bool(num_tokens)
        decode.worker.get_finished([])
        assert not pace.is_computing
    decode.finish("d")


def test_an_idle_engine_costs_nothing(make_engine, fetch) -> None:
    prefill, decode = make_engine("prefill"), make_engine("decode")
    fetch(decode, "d", PROMPT, prefill.prefill("p", PROMPT).kv_transfer_params, beside=[prefill])
    prefill.step_until(lambda: prefill.worker._producer.progress_interval_s is None)
    began, began_cpu = time.monotonic(), time.process_time()
    threading.Event().wait(1.0)
    share = (time.process_time() - began_cpu) / (time.monotonic() - began)
    assert share < 0.05


def test_nothing_listens_beyond_loopback(make_engine) -> None:
    make_engine("prefill")
    make_engine("decode")
    inodes = {os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()}
    addresses = set()
    for line in [*Path("/proc/net/tcp").read_text().splitlines()[1:], *_read_tcp6()]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
            addresses.add(fields[1].split(":")[0])
    assert addresses
    assert addresses <= {"0100007F", "00000000000000000000000001000000"}


def _read_tcp6() -> list[str]:
    path = Path("/proc/net/tcp6")
    return path.read_text().splitlines()[1:] if path.exists() else []


def test_a_taken_port_is_one_line(make_engine, free_port: int) -> None:
    make_engine("prefill", port=free_port)
    with pytest.raises(ConfigError, match=f"cannot listen on tcp://127.0.0.1:{free_port}.*host or port"):
        make_engine("prefill", port=free_port)


def test_closing_with_transfers_under_way_ends_in_time(make_engine) -> None:
    prefill, decode = make_engine("prefill"), make_engine("decode")
    for index in range(8):
        params = prefill.prefill(f"p{index}", PROMPT).kv_transfer_params
        decode.submit(f"d{index}", PROMPT, params=params)
        decode.admit(f"d{index}", decode.lookup(f"d{index}").num_tokens or 0)
    prefill.step()
    decode.step()
    began = time.monotonic()
    for engine in (decode, prefill):
        engine.close()
        engine.close()
    assert time.monotonic() - began < 4.0
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("kv-")]


def test_a_message_that_comes_again_when_its_load_has_ended_starts_nothing(make_engine) -> None:
    prefill, decode = make_engine("prefill"), make_engine("decode")
    params = prefill.prefill("p", PROMPT).kv_transfer_params
    decode.submit("d", PROMPT, params=params)
    decode.admit("d", decode.lookup("d").num_tokens or 0)
    metadata = decode.build_metadata({})
    decode.worker.start_load_kv(metadata)
    prefill.step_until(lambda: "d" in decode.worker._report._output.finished_receiving)
    decode.worker.start_load_kv(metadata)
    decode.step_until(lambda: "d" in decode.received)
    assert decode.received == {"d": len(PROMPT)}
    for _ in range(20):
        decode.step()
    decode.finish("d")  # the harness compares the blocks once more
    assert decode.stats.failures == {"duplicate": 1}
