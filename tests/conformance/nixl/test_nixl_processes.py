"""Producers in other processes: real copies between address spaces, and peers that stop, die and come back."""

from __future__ import annotations

from pdserve.connectors.testing.kv_content import TINY_SPEC

S = TINY_SPEC.block_size
PROMPT = list(range(100, 100 + 4 * S + 1))
OTHER = list(range(900, 900 + 2 * S + 1))
PATIENT = {"answer_timeout_s": 600.0}
"""For an engine that must notice by itself: no test waits as long as this."""


def test_kv_comes_from_another_process(make_engine, start_peer, fetch, transport) -> None:
    decode, peer = make_engine("decode"), start_peer()
    for index in range(3):
        assert fetch(decode, f"d{index}", PROMPT, peer.hand_over(PROMPT)) == len(PROMPT)
    assert decode.stats.failures == {}


def test_killed_before_the_first_transfer(make_engine, start_peer, fetch) -> None:
    decode, peer = make_engine("decode", **PATIENT), start_peer()
    params = peer.hand_over(PROMPT)
    peer.kill()
    assert fetch(decode, "d", PROMPT, params) == 0
    assert decode.stats.failures == {"disconnected": 1}


def test_killed_in_the_middle_of_a_read(make_engine, start_peer, fetch, monkeypatch) -> None:
    """Over TCP, where the producer takes part in the read: it stands still in the middle of it, and is killed."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    decode, peer = make_engine("decode", **PATIENT), start_peer()
    assert fetch(decode, "first", OTHER, peer.hand_over(OTHER)) == len(OTHER)
    params = peer.hand_over(PROMPT)
    peer.stop()
    decode.submit("d", PROMPT, params=params)
    block_ids = decode.admit("d", decode.lookup("d").num_tokens or 0)
    decode.step_until(lambda: decode.worker._consumer.is_waiting_for_read)
    assert "d" not in decode.received
    peer.kill()
    decode.step_until(lambda: "d" in decode.received)
    assert decode.received["d"] == 0
    assert decode.stats.failures == {"disconnected": 1}
    assert all((decode.read_block(block_id) == 0).all() for block_id in block_ids)
    decode.finish("d")
    assert decode.num_used_blocks == 0


def test_killed_when_everything_is_read_and_nothing_confirmed(make_engine, start_peer, fetch) -> None:
    """Copies between processes need no help from the producer: it may be gone before it says that they count."""
    decode, peer = make_engine("decode"), start_peer()
    assert fetch(decode, "first", OTHER, peer.hand_over(OTHER)) == len(OTHER)
    params = peer.hand_over(PROMPT)
    peer.stop()
    decode.submit("d", PROMPT, params=params)
    decode.admit("d", decode.lookup("d").num_tokens or 0)
    decode.step()
    decode.step_until(lambda: not decode.worker._consumer.wants_to_run)
    assert "d" not in decode.received
    peer.kill()
    decode.step_until(lambda: "d" in decode.received)
    assert decode.received["d"] == 0
    decode.finish("d")


def test_a_producer_that_stands_still_costs_a_bounded_time(make_engine, start_peer, fetch, monkeypatch) -> None:
    """And is of use again when it goes on."""
    decode, peer = make_engine("decode", **PATIENT), start_peer()
    assert fetch(decode, "first", OTHER, peer.hand_over(OTHER)) == len(OTHER)
    params = peer.hand_over(PROMPT)
    peer.stop()
    with monkeypatch.context() as hurried:
        for part in (decode.worker._consumer, decode.worker._consumer._reads):
            hurried.setattr(part, "_timeout_s", 0.5)
        assert fetch(decode, "d", PROMPT, params) == 0
    assert decode.stats.failures == {"timeout": 1}
    peer.go_on()
    assert fetch(decode, "e", PROMPT, peer.hand_over(PROMPT)) == len(PROMPT)


def test_restarted_on_the_same_port(make_engine, start_peer, fetch, free_port: int, transport) -> None:
    decode, peer = make_engine("decode"), start_peer(port=free_port)
    assert fetch(decode, "first", OTHER, peer.hand_over(OTHER)) == len(OTHER)
    old = peer.hand_over(PROMPT)
    for generation in range(3):
        peer.kill()
        peer = start_peer(port=free_port)
        assert fetch(decode, f"old{generation}", PROMPT, old) == 0
        new = peer.hand_over(PROMPT)
        assert fetch(decode, f"new{generation}", PROMPT, new) == len(PROMPT)
        assert fetch(decode, f"again{generation}", PROMPT, new) == 0
        old = peer.hand_over(PROMPT)
    assert decode.num_used_blocks == 0
    assert set(decode.stats.failures) <= {"stale", "expired", "disconnected"}
