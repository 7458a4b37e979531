"""The rules of the connector contract, on the shared-storage connector, without faults of the disk.

The harness checks by itself that a lookup is pure, that nothing claims more than the prompt, that every loaded
byte is the model's, and that each report is owed and comes once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from pdserve.connectors.base import MatchResult, ScheduledTokens, StepPlan
from pdserve.connectors.blocks.messages import StepMetadata
from pdserve.connectors.testing import EngineHarness
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.kv_layout import BlockHasher

S = TINY_SPEC.block_size
PROMPT = list(range(100, 100 + 4 * S + 1))  # four whole blocks and one token


def stored_keys(store: Path) -> set[str]:
    return {path.stem for path in store.glob("?/?/*.kv")}


def keys_of(engine: EngineHarness, token_ids: Sequence[int]) -> list[str]:
    hasher = BlockHasher(engine.context.identity.fingerprint)
    return [key.hex for key in hasher.block_keys(token_ids, S)]


@pytest.mark.parametrize("length", [1, S - 1, S, S + 1, 2 * S, 4 * S + 1, 9 * S + 3])
def test_a_whole_prompt_travels(make_engine, length: int) -> None:
    prompt = list(range(length))
    assert make_engine("prefill").send("p", prompt)
    decode = make_engine("decode")
    assert decode.load("d", prompt) == length
    decode.finish("d")
    assert decode.num_used_blocks == 0
    num_blocks = TINY_SPEC.num_blocks_for(length)
    assert (decode.stats.num_blocks_loaded, decode.stats.failures) == (num_blocks, {})


def test_r1_counts_are_beyond_local(make_engine) -> None:
    make_engine("prefill").send("p", PROMPT)
    decode = make_engine("decode")
    decode.submit("d", PROMPT)
    counts = [decode.lookup("d", local).num_tokens for local in range(0, 5 * S, S)]
    assert counts == [4 * S + 1, 3 * S + 1, 2 * S + 1, S + 1, 1]
    assert decode.lookup("d", 4 * S + 1) == MatchResult(0)
    assert decode.lookup("d", 8 * S) == MatchResult(0)  # resumed: local hits reach into the answer
    decode.admit("d", 2 * S + 1, 2 * S)
    decode.lookup("d", 2 * S)
    decode.finish("d")


def test_r1_a_load_behind_local_tokens_leaves_them_alone(make_engine) -> None:
    make_engine("prefill").send("p", PROMPT)
    decode = make_engine("decode")
    assert decode.load("d", PROMPT, num_local_tokens=2 * S) == 2 * S + 1
    assert decode.stats.num_blocks_loaded == 3


def test_r1_sixteen_local_twentyfour_stored_gives_eight(make_engine) -> None:
    # In units of a block of 4: 4 tokens local, 6 in the store as one whole and one partial block.
    make_engine("prefill").send("p", list(range(6)))
    decode = make_engine("decode")
    decode.submit("d", list(range(6)))
    assert decode.lookup("d", 4).num_tokens == 2


def test_r1_a_count_inside_a_block_is_answered_with_nothing(make_engine) -> None:
    make_engine("prefill").send("p", PROMPT)
    decode = make_engine("decode")
    decode.submit("d", PROMPT)
    assert [decode.lookup("d", local) for local in (1, S - 1, S + 1, 4 * S + 1)] == [MatchResult(0)] * 4


def test_r2_a_whole_prompt_hit_less_the_last_token(make_engine) -> None:
    """The scheduler keeps a token back when it has to compute one; the load then claims that many."""
    make_engine("prefill").send("p", PROMPT[: 4 * S])
    decode = make_engine("decode")
    decode.submit("d", PROMPT[: 4 * S])
    assert decode.lookup("d").num_tokens == 4 * S
    decode.admit("d", 4 * S - 1)
    decode.step_until(lambda: "d" in decode.received)
    assert decode.received["d"] == 4 * S - 1


def test_r3_a_lookup_changes_nothing_and_allocation_may_fail_many_times(make_engine) -> None:
    make_engine("prefill").send("p", PROMPT)
    decode = make_engine("decode")
    decode.submit("d", PROMPT)
    answers = {decode.lookup("d").num_tokens for _ in range(5)}
    assert answers == {4 * S + 1}
    assert decode.scheduler.build_connector_metadata(StepPlan(())) == StepMetadata()


def test_r4_the_run_ends_at_the_first_missing_block(make_engine, store: Path) -> None:
    prefill = make_engine("prefill")
    prefill.send("p", PROMPT)
    third = keys_of(prefill, PROMPT)[2]
    next(store.glob(f"?/?/{third}.kv")).unlink()
    decode = make_engine("decode")
    decode.submit("d", PROMPT)
    assert decode.lookup("d").num_tokens == 2 * S
    assert decode.lookup("d", 3 * S).num_tokens == S + 1


def test_r5_a_partial_block_never_counts_for_a_longer_prompt(make_engine) -> None:
    make_engine("prefill").send("p", PROMPT)
    decode = make_engine("decode")
    assert decode.load("longer", [*PROMPT, 7, 8]) == 4 * S
    assert decode.load("shorter", PROMPT[: 3 * S + 2]) == 3 * S


def test_r5_slots_behind_a_partial_block_are_zero(make_engine) -> None:
    make_engine("prefill").send("p", PROMPT)
    decode = make_engine("decode")
    decode.submit("d", PROMPT)
    block_ids = decode.admit("d", decode.lookup("d").num_tokens or 0)
    decode.step_until(lambda: "d" in decode.received)
    for index, block_id in enumerate(block_ids):
        expected = decode.content.get_block(PROMPT, index)
        assert (decode.read_block(block_id) == expected).all()


@pytest.mark.parametrize("chunk", [1, S - 1, S, S + 1, 2 * S, 3 * S + 1])
def test_r6_every_chunk_is_saved(make_engine, store: Path, chunk: int) -> None:
    prefill = make_engine("prefill")
    assert prefill.send("p", PROMPT, chunk=chunk)
    assert stored_keys(store) == set(keys_of(prefill, PROMPT))
    assert make_engine("decode").load("d", PROMPT) == len(PROMPT)


def test_r6_a_claim_covers_only_what_is_saved(make_engine) -> None:
    prefill, decode = make_engine("prefill"), make_engine("decode")
    prefill.submit("p", PROMPT)
    prefill.admit("p", 0)
    decode.submit("d", PROMPT)
    for num_tokens, num_stored in ((S + 2, S), (S - 3, S), (1, 2 * S)):
        prefill.step({"p": num_tokens})
        prefill.step_until(lambda n=num_stored: decode.lookup("d").num_tokens == n)
    prefill.finish("p")
    prefill.step()
    assert prefill.is_idle


def test_r7_nothing_uncomputed_is_saved_when_the_forward_pass_fails(make_engine, store: Path) -> None:
    """The runner then skips `wait_for_save`; the next step must not save the blocks after all."""
    prefill = make_engine("prefill")
    request = prefill.submit("p", PROMPT)
    block_ids = prefill.admit("p", 0)
    plan = StepPlan((ScheduledTokens(request, block_ids, 0, len(PROMPT)),))
    prefill.worker.start_load_kv(prefill.scheduler.build_connector_metadata(plan))
    prefill.finish("p")
    prefill.step()
    prefill.step_until(lambda: not prefill.worker._saver._writing)
    assert stored_keys(store) == set()


def test_r8_blocks_may_be_reused_at_once_after_the_step(make_engine) -> None:
    """The harness writes over freed blocks while the writer is still held back."""
    prefill = make_engine("prefill", writer_threads=1)
    gate = threading.Event()
    prefill.worker._writers.submit(gate.wait)
    prefill.prefill("p", PROMPT)
    assert prefill.num_used_blocks == 0
    prefill.step()
    assert "p" not in prefill.sent
    gate.set()
    prefill.step_until(lambda: "p" in prefill.sent)
    assert make_engine("decode").load("d", PROMPT) == len(PROMPT)


def test_r8_preempted_and_resumed(make_engine, store: Path) -> None:
    prefill = make_engine("prefill")
    prefill.submit("p", PROMPT)
    prefill.admit("p", 0)
    prefill.step({"p": 2 * S})
    prefill.step(preempted=["p"])
    assert prefill.num_used_blocks == 0
    prefill.step_until(lambda: len(stored_keys(store)) == 2 and not prefill.worker._saver._writing)
    for file in store.glob("?/?/*.kv"):
        file.unlink()  # the store lost meanwhile what was saved
    prefill.lookup("p")
    prefill.admit("p", 0)
    prefill.step({"p": len(PROMPT)})
    prefill.finish("p", handoff=True)
    prefill.step_until(lambda: "p" in prefill.sent)
    assert prefill.sent["p"]
    assert make_engine("decode").load("d", PROMPT) == len(PROMPT)


def test_r8_preempted_after_a_load(make_engine) -> None:
    make_engine("prefill").send("p", PROMPT)
    decode = make_engine("decode")
    assert decode.load("d", PROMPT) == len(PROMPT)
    decode.step(preempted=["d"])
    assert decode.num_used_blocks == 0
    assert decode.lookup("d").num_tokens == len(PROMPT)  # a store may be asked again
    decode.admit("d", 0)
    decode.step({"d": len(PROMPT)})
    decode.finish("d")
    decode.step()
    assert decode.num_used_blocks == 0


def test_r9_fifty_aborts_during_a_load(make_engine) -> None:
    make_engine("prefill").send("p", PROMPT)
    decode = make_engine("decode")
    for number in range(50):
        name = f"d{number}"
        decode.submit(name, PROMPT)
        decode.admit(name, decode.lookup(name).num_tokens or 0)
        if number % 2:
            decode.step()
        decode.finish(name)
        if number % 10 == 9:
            decode.step_until(lambda: decode.is_idle)
    decode.step_until(lambda: decode.is_idle)
    assert len(decode.received) == 50
    assert decode.num_used_blocks == 0
    assert decode.load("after", PROMPT) == len(PROMPT)
    _assert_nothing_is_kept(decode, "after")


def test_r9_aborts_before_during_and_after_a_save(make_engine) -> None:
    prefill = make_engine("prefill")
    prefill.submit("never-ran", PROMPT)
    prefill.finish("never-ran")
    prefill.submit("half", PROMPT)
    prefill.admit("half", 0)
    prefill.step({"half": 2 * S})
    prefill.finish("half")
    prefill.submit("preempted", PROMPT)
    prefill.admit("preempted", 0)
    prefill.step({"preempted": 2 * S})
    prefill.step(preempted=["preempted"])
    prefill.finish("preempted")
    prefill.submit("whole", PROMPT)
    prefill.admit("whole", 0)
    prefill.step({"whole": len(PROMPT)})
    prefill.finish("whole")
    for _ in range(3):
        prefill.step()
    assert prefill.is_idle
    assert prefill.sent == {}
    assert prefill.num_used_blocks == 0
    _assert_nothing_is_kept(prefill)


def _assert_nothing_is_kept(engine: EngineHarness, *live: str) -> None:
    """No half remembers a request that has ended."""
    scheduler, saver = engine.scheduler, engine.worker._saver
    for kept in (scheduler._num_saved_blocks, scheduler._failed_loads, scheduler._loading):
        assert set(kept) <= set(live)
    for kept in (saver._senders, saver._announced, engine.worker._loader._active):
        assert set(kept) <= set(live)


def test_r9_duplicate_and_unknown_ids_are_refused(make_engine) -> None:
    prefill = make_engine("prefill")
    prefill.send("p", PROMPT)
    for request_ids in (["p"], ["never-seen"], ["p", "never-seen"]):
        output = prefill.worker.get_finished(request_ids)
        assert output.finished_sending == set()
        assert output.stats.failures == {"unknown": len(request_ids)}
    decode = make_engine("decode")
    decode.submit("d", PROMPT)
    decode.admit("d", decode.lookup("d").num_tokens or 0)
    metadata = decode.scheduler.build_connector_metadata(StepPlan(()))
    decode.worker.start_load_kv(metadata)
    decode.worker.start_load_kv(metadata)
    decode.step_until(lambda: "d" in decode.received)
    for _ in range(5):
        decode.step()
    assert decode.stats.failures == {"duplicate": 1}


def test_r10_a_send_of_stored_keys_is_reported_once(make_engine) -> None:
    prefill = make_engine("prefill")
    assert prefill.send("first", PROMPT)
    assert prefill.stats.num_blocks_saved == 5
    assert prefill.send("second", PROMPT, chunk=3)
    assert make_engine("prefill").send("elsewhere", PROMPT)
    for _ in range(3):
        prefill.step()
    assert prefill.stats.num_blocks_saved == 5
    assert prefill.num_used_blocks == 0
    _assert_nothing_is_kept(prefill)


def test_r10_two_requests_wait_for_one_write(make_engine) -> None:
    prefill = make_engine("prefill", writer_threads=1)
    gate = threading.Event()
    prefill.worker._writers.submit(gate.wait)
    for name in ("a", "b"):
        prefill.submit(name, PROMPT)
        prefill.admit(name, 0)
    prefill.step({"a": len(PROMPT), "b": len(PROMPT)})
    for name in ("a", "b"):
        prefill.finish(name, handoff=True)
    prefill.step()
    assert prefill.sent == {}
    gate.set()
    prefill.step_until(lambda: len(prefill.sent) == 2)
    assert prefill.sent == {"a": True, "b": True}
    assert prefill.stats.num_blocks_saved == 5


def test_r10_a_prefix_hit_is_saved_when_the_store_has_lost_it(make_engine, store: Path) -> None:
    prefill = make_engine("prefill")
    prefill.send("p", PROMPT)
    for file in store.glob("?/?/*.kv"):
        file.unlink()
    prefill.submit("again", PROMPT)
    prefill.admit("again", 0, num_local_tokens=4 * S)
    prefill.step({"again": 1})
    prefill.finish("again", handoff=True)
    prefill.step_until(lambda: "again" in prefill.sent)
    assert make_engine("decode").load("d", PROMPT) == len(PROMPT)


def test_r11_a_failure_is_reported_when_all_parts_have_stopped(make_engine, store: Path) -> None:
    """Twenty blocks are several parts; the first fails while the last is held back."""
    prompt = list(range(20 * S))
    prefill = make_engine("prefill", num_blocks=32)
    prefill.send("p", prompt)
    decode = make_engine("decode", num_blocks=32, reader_threads=3)
    decode.submit("d", prompt)
    decode.admit("d", decode.lookup("d").num_tokens or 0)
    keys = keys_of(prefill, prompt)
    next(store.glob(f"?/?/{keys[3]}.kv")).unlink()
    gate, last_part_runs = threading.Event(), threading.Event()
    read = decode.worker._store.read

    def held_read(blocks, memory):
        if blocks[0].digest.hex() == keys[0]:
            last_part_runs.wait()
        if blocks[-1].digest.hex() == keys[-1]:
            last_part_runs.set()
            gate.wait()
        yield from read(blocks, memory)

    decode.worker._store.read = held_read
    decode.step()
    decode.step_until(lambda: decode.stats.failures == {"missing": 1})
    for _ in range(3):
        decode.step()
    assert "d" not in decode.received
    gate.set()
    decode.step_until(lambda: "d" in decode.received)
    assert decode.received["d"] == 3 * S


@pytest.mark.parametrize(
    "other", [{"weights": "weights-2"}, {"spec": msgspec.structs.replace(TINY_SPEC, dtype="float32")}]
)
def test_r14_other_models_in_one_store_never_meet(make_engine, other: dict) -> None:
    make_engine("prefill").send("p", PROMPT)
    stranger = make_engine("decode", **other)
    stranger.submit("d", PROMPT)
    assert stranger.lookup("d") == MatchResult(0)


def test_r14_other_salts_never_meet(make_engine) -> None:
    make_engine("prefill").send("p", PROMPT, salt="mine")
    decode = make_engine("decode")
    decode.submit("none", PROMPT)
    decode.submit("other", PROMPT, salt="yours")
    assert decode.lookup("none") == decode.lookup("other") == MatchResult(0)
    assert decode.load("same", PROMPT, salt="mine") == len(PROMPT)


def test_r16_parameters_name_the_transfer(make_engine) -> None:
    prefill = make_engine("prefill")
    decision = prefill.prefill("p", PROMPT)
    params = decision.kv_transfer_params
    assert decision.announce_when_sent
    assert not decision.hold_blocks
    assert params is not None
    assert (params.connector, params.transfer_id, params.engine_id) == ("shared_storage", "engine-0:p", "engine-0")
    assert (params.num_tokens, params.num_bytes) == (len(PROMPT), 5 * TINY_SPEC.block_bytes)


def test_r20_transfers_progress_on_idle_steps(make_engine) -> None:
    prefill = make_engine("prefill")
    prefill.prefill("p", PROMPT)
    prefill.step_until(lambda: "p" in prefill.sent)  # steps with no tokens only
    decode = make_engine("decode")
    assert decode.load("d", PROMPT) == len(PROMPT)


@pytest.mark.parametrize(
    ("role", "save", "stored"),
    [
        ("prefill", "auto", True),
        ("prefill", "never", False),
        ("decode", "auto", False),
        ("decode", "always", True),
    ],
)
def test_who_saves(make_engine, store: Path, role: str, save: str, stored: bool) -> None:
    engine = make_engine(role, save=save)
    engine.submit("p", PROMPT)
    engine.admit("p", 0)
    engine.step({"p": len(PROMPT)})
    decision = engine.finish("p")
    assert not decision.expects_sent
    engine.step_until(lambda: not engine.worker._saver._writing)
    assert bool(stored_keys(store)) is stored
    engine.step()
    _assert_nothing_is_kept(engine)


def test_a_handoff_that_saves_nothing_promises_nothing(make_engine) -> None:
    engine = make_engine("prefill", save="never")
    assert not engine.prefill("p", PROMPT).expects_sent


def test_shared_prefixes_are_reused_in_every_order(make_engine) -> None:
    """Context, half of it, all of it and more; local hits and store mixed."""
    prefill = make_engine("prefill")
    full = list(range(8 * S + 2))
    for name, prompt in (("whole", full), ("half", full[: 4 * S]), ("more", [*full, 1, 2, 3]), ("again", full)):
        assert prefill.send(name, prompt)
    decode = make_engine("decode")
    for name, prompt, local, expected in (
        ("a", full, 0, 8 * S + 2),
        ("b", full, 4 * S, 4 * S + 2),
        ("c", full[: 4 * S], 2 * S, 2 * S),
        ("d", [*full, 1, 2, 3], 6 * S, 2 * S + 5),
    ):
        assert decode.load(name, prompt, num_local_tokens=local) == expected
        decode.finish(name)
    assert decode.num_used_blocks == 0


def test_a_closed_engine_drops_transfers(make_engine) -> None:
    make_engine("prefill").send("p", PROMPT)
    engine = make_engine("prefill")
    engine.close()
    engine.close()
    engine.submit("d", PROMPT)
    engine.admit("d", engine.lookup("d").num_tokens or 0)
    engine.step({"d": len(PROMPT)})
    engine.step()
    assert engine.received == {}
    assert engine.stats.num_blocks_saved == 0


def test_close_ends_the_threads(make_engine) -> None:
    before = threading.active_count()
    prefill, decode = make_engine("prefill"), make_engine("decode")
    prefill.send("p", PROMPT)
    decode.load("d", PROMPT)
    assert threading.active_count() > before
    prefill.close()
    decode.close()
    assert threading.active_count() == before


def test_messages_are_plain_data(make_engine) -> None:
    prefill = make_engine("prefill")
    request = prefill.submit("p", PROMPT)
    plan = StepPlan((ScheduledTokens(request, prefill.admit("p", 0), 0, len(PROMPT)),))
    metadata = prefill.scheduler.build_connector_metadata(plan)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(metadata), type=StepMetadata) == metadata
    assert len(metadata.saves[0].blocks) == 5
