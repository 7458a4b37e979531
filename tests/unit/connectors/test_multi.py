"""One connector made of several: who is asked, who is told what, and how often the engine hears of an end."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from pdserve.connectors.base import (
    CancelsSends,
    ConnectorFeatures,
    ConnectorOutput,
    HearsOfQueue,
    KVRequest,
    MatchResult,
    WakesEngine,
)
from pdserve.connectors.blocks.messages import BlockTransfer, LoadRequest, StepMetadata
from pdserve.connectors.messages import MessageCodec, MessageTypes
from pdserve.connectors.multi import MultiConnector
from pdserve.connectors.multi.children import compose_features, parse_children
from pdserve.connectors.multi.messages import ChildSent, MultiMetadata, MultiReport, OwedSend, OwnedLoad
from pdserve.connectors.testing import EngineHarness, build_context
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.errors import ConfigError
from pdserve.kv_layout import BlockHasher, Rank
from pdserve.protocol import KVTransferParams, Role

S = TINY_SPEC.block_size
PROMPT = list(range(4 * S + 1))
MakeEngine = Callable[..., EngineHarness]


def memory_child(store: dict[bytes, bytes]) -> dict[str, Any]:
    return {"connector": "memory", "options": {"store": store}}


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The direct connector's module, where the registry finds it by name."""
    path = Path(__file__).with_name("direct_double.py")
    spec = importlib.util.spec_from_file_location("direct_double", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "direct_double", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def world(double: ModuleType) -> Any:
    return double.World()


@pytest.fixture
def other_world(double: ModuleType) -> Any:
    return double.World()


@pytest.fixture
def memory() -> dict[bytes, bytes]:
    return {}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def make_engine(world, other_world, memory, files: Path) -> Iterator[MakeEngine]:
    """Engines with the named children, in order."""
    engines: list[EngineHarness] = []
    known = {
        "direct": {"connector": "direct_double:DirectConnector", "options": {"world": world}, "name": "direct"},
        "second": {"connector": "direct_double:DirectConnector", "options": {"world": other_world}, "name": "second"},
        "layerwise": {"connector": "direct_double:LayerwiseConnector", "options": {"world": world}, "name": "lw"},
        "memory": {"connector": "memory", "options": {"store": memory}},
        "files": {"connector": "shared_storage", "options": {"path": str(files)}},
    }

    def make(role: str, *names: str) -> EngineHarness:
        options = {"children": [known[name] for name in names]}
        context = build_context(Role(role), options, engine_id=f"engine-{len(engines)}")
        engines.append(EngineHarness(MultiConnector, context))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def fetch(engine: EngineHarness, name: str, params: KVTransferParams | None) -> int:
    engine.submit(name, PROMPT, params=params)
    match = engine.lookup(name)
    engine.admit(name, match.num_tokens or 0)
    if not match.num_tokens:
        return 0
    engine.step_until(lambda: name in engine.received)
    return engine.received[name]


def note_loaded_blocks(engine: EngineHarness) -> Counter[str]:
    """Blocks that each child loads from now on, as the engine's metrics would have it."""
    loaded: Counter[str] = Counter()
    get_finished = engine.worker.get_finished

    def get_finished_and_note(finished_request_ids: Sequence[str]) -> ConnectorOutput:
        output = get_finished(finished_request_ids)
        loaded.update({name: n for name, stats in output.parts.items() if (n := stats.num_blocks_loaded)})
        return output

    engine.worker.get_finished = get_finished_and_note  # type: ignore[method-assign]
    return loaded


def save(engine: EngineHarness, name: str = "p") -> KVTransferParams | None:
    """A hand-off that nobody waits for; it ends with the children's writes."""
    decision = engine.prefill(name, PROMPT)
    assert not decision.expects_sent
    engine.step()
    engine.step_until(lambda: name not in engine.worker._sends)
    return decision.kv_transfer_params


# --- stores ----------------------------------------------------------------------------------------------------


def test_every_child_saves_and_the_first_with_tokens_is_read(make_engine, memory, files: Path) -> None:
    prefill = make_engine("prefill", "memory", "files")
    assert save(prefill) is not None
    assert prefill.sent == {}
    assert prefill.num_used_blocks == 0
    assert len(memory) == len(list(files.glob("?/?/*"))) == 5
    assert prefill.stats.num_blocks_saved == 10
    decode = make_engine("decode", "memory", "files")
    loaded = note_loaded_blocks(decode)
    assert fetch(decode, "d1", None) == len(PROMPT)
    assert loaded == {"memory": 5}
    memory.clear()
    assert fetch(decode, "d2", None) == len(PROMPT)
    assert loaded == {"memory": 5, "shared_storage": 5}
    assert decode.stats.num_bytes_loaded == 10 * TINY_SPEC.block_bytes
    shutil.rmtree(files)
    assert fetch(decode, "d3", None) == 0


def test_who_has_most_is_read_and_the_first_of_equals(make_engine, memory, files: Path) -> None:
    save(make_engine("prefill", "memory", "files"))
    digests = list(memory)
    decode = make_engine("decode", "memory", "files")
    for index in (4, 2):
        del memory[digests[index]]
        assert fetch(decode, f"d{index}", None) == len(PROMPT)
    file = next(files.glob(f"?/?/{digests[2].hex()}.kv"))
    file.unlink()
    loaded = note_loaded_blocks(decode)
    assert fetch(decode, "equal", None) == 2 * S
    assert loaded == {"memory": 2}


def test_one_childs_failure_is_not_the_others(make_engine, memory, files: Path) -> None:
    prefill, decode = make_engine("prefill", "files", "memory"), make_engine("decode", "files", "memory")
    shutil.rmtree(files)
    assert save(prefill) is not None
    assert prefill.stats.failures == {"missing": 5}
    assert fetch(decode, "d", None) == len(PROMPT)


def test_stores_that_announce_are_waited_for_and_fail_when_all_do(make_engine, files: Path) -> None:
    prefill = make_engine("prefill", "files")
    assert prefill.send("p", PROMPT)
    shutil.rmtree(files)
    assert not prefill.send("q", [7, *PROMPT])


# --- a direct child and a store --------------------------------------------------------------------------------


def test_blocks_are_held_until_the_consumer_has_them_and_all_have_saved(make_engine, world, files: Path) -> None:
    prefill, decode = make_engine("prefill", "direct", "files"), make_engine("decode", "direct", "files")
    decision = prefill.prefill("p", PROMPT)
    assert decision.hold_blocks
    assert not decision.announce_when_sent
    prefill.step_until(lambda: len(list(files.glob("?/?/*"))) == 5)
    for _ in range(3):
        prefill.step()
    assert prefill.sent == {}
    assert prefill.num_used_blocks == 5
    assert fetch(decode, "d", decision.kv_transfer_params) == len(PROMPT)
    assert world.counts_after_alloc == [0, len(PROMPT)]
    prefill.step_until(lambda: prefill.is_idle)
    assert prefill.sent == {"p": True}
    assert prefill.num_used_blocks == 0
    assert decode.stats.num_blocks_loaded == 0
    assert prefill.stats.failures == decode.stats.failures == {}


def test_a_direct_child_that_breaks_leaves_the_load_to_the_store(make_engine, world) -> None:
    prefill, decode = make_engine("prefill", "direct", "files"), make_engine("decode", "direct", "files")
    params = prefill.prefill("p", PROMPT).kv_transfer_params
    prefill.step()
    world.is_broken = True
    assert fetch(decode, "d", params) == 0
    assert decode.stats.failures == {"unreachable": 1}
    world.fetched.add("engine-0/p")
    prefill.step_until(lambda: prefill.is_idle)
    assert fetch(decode, "again", None) == len(PROMPT)


def test_each_childs_scheduler_hears_of_its_own_transfers(make_engine, world) -> None:
    prefill, decode = make_engine("prefill", "direct", "files"), make_engine("decode", "files", "direct")
    params = prefill.prefill("p", PROMPT).kv_transfer_params
    prefill.step()
    assert params is not None
    prefill.step_until(lambda: prefill.worker._halves[1]._saver._writing == {})
    assert fetch(decode, "d", params) == len(PROMPT)  # from the files, which come first here
    heard = [output for output in world.heard_by_scheduler if output.finished_receiving]
    assert heard == []
    world.fetched.add("engine-0/p")
    prefill.step_until(lambda: prefill.is_idle)
    assert [output.finished_sending for output in world.heard_by_scheduler if output.finished_sending] == [{"p"}]
    assert prefill.scheduler._sent_by == decode.scheduler._loading_by == {}


def test_an_abort_leaves_nothing(make_engine) -> None:
    prefill, decode = make_engine("prefill", "direct", "files"), make_engine("decode", "direct", "files")
    prefill.submit("never-ran", PROMPT)
    assert not prefill.finish("never-ran").expects_sent
    params = prefill.prefill("p", PROMPT).kv_transfer_params
    decode.submit("d", PROMPT, params=params)
    decode.lookup("d")
    decode.finish("d")
    assert decode.scheduler._promises == decode.scheduler._failed_by == {}
    decode.submit("e", PROMPT, params=params)
    decode.admit("e", decode.lookup("e").num_tokens or 0)
    decode.finish("e")
    decode.step_until(lambda: decode.is_idle)
    assert decode.num_used_blocks == 0
    assert decode.scheduler._failed_by == decode.scheduler._loading_by == decode.worker._loading_by == {}


def test_a_request_whose_load_failed_is_loaded_by_the_next_child(make_engine, world) -> None:
    prefill, decode = make_engine("prefill", "direct", "files"), make_engine("decode", "direct", "files")
    params = prefill.prefill("p", PROMPT).kv_transfer_params
    prefill.step_until(lambda: prefill.worker._halves[1]._saver._writing == {})
    world.is_broken = True
    assert fetch(decode, "d", params) == 0  # and the first child would promise it again
    request = decode._live["d"].request
    match = decode.scheduler.get_num_new_matched_tokens(request, 0)
    assert match == MatchResult(len(PROMPT), is_async=True, part="shared_storage")
    assert decode.scheduler._promises["d"][0].child == 1
    decode.finish("d")
    assert decode.scheduler._failed_by == {}


def test_a_load_that_fails_after_its_request_was_aborted_is_forgotten(make_engine, world) -> None:
    prefill, decode = make_engine("prefill", "direct", "files"), make_engine("decode", "direct", "files")
    params = prefill.prefill("p", PROMPT).kv_transfer_params
    world.is_broken = True
    decode.submit("d", PROMPT, params=params)
    decode.admit("d", decode.lookup("d").num_tokens or 0)
    decode.finish("d")
    decode.step_until(lambda: decode.is_idle)
    assert decode.received == {"d": 0}
    assert decode.scheduler._failed_by == decode.scheduler._loading_by == {}


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_synchronous_child_leaves_nothing_to_report(make_engine, world, is_broken: bool) -> None:
    world.is_async = False
    prefill, decode = make_engine("prefill", "direct"), make_engine("decode", "direct", "files")
    params = prefill.prefill("p", PROMPT).kv_transfer_params
    world.is_broken = is_broken
    assert fetch(decode, "d", params) == (0 if is_broken else len(PROMPT))
    assert decode.worker._loading_by == decode.scheduler._loading_by == {}


def test_lookups_at_other_places_do_not_change_who_loads(make_engine, memory) -> None:
    prefill, decode = make_engine("prefill", "direct", "memory"), make_engine("decode", "direct", "memory")
    params = prefill.prefill("p", PROMPT).kv_transfer_params
    prefill.step()
    decode.submit("d", PROMPT, params=params)
    promised = decode.lookup("d").num_tokens
    assert decode.lookup("d", 2 * S).num_tokens == promised - 2 * S  # the memory child's
    memory.clear()
    decode.admit("d", promised)
    decode.step_until(lambda: "d" in decode.received)
    assert decode.received == {"d": len(PROMPT)}


def test_each_child_hears_what_became_of_a_sending_in_it(make_engine, memory, files: Path, monkeypatch) -> None:
    prefill = make_engine("prefill", "memory", "files")
    heard: list[ConnectorOutput] = []
    monkeypatch.setattr(prefill.scheduler._halves[1], "update_from_output", heard.append)
    save(prefill, "whole")
    shutil.rmtree(files)
    save(prefill, "failed")
    assert prefill.sent == {}  # nobody waits: the first child's parameters were good at once
    ends = [(output.finished_sending, output.failed_sending) for output in heard if output.finished_sending]
    assert ends == [({"whole"}, set()), ({"failed"}, {"failed"})]
    (num_bytes,) = (output.sent_bytes["whole"] for output in heard if output.sent_bytes.get("whole"))
    assert num_bytes == 5 * TINY_SPEC.block_bytes


def test_a_cancelled_send_is_cancelled_where_blocks_are_held(make_engine, world, other_world) -> None:
    prefill = make_engine("prefill", "direct", "files", "second")
    assert isinstance(prefill.scheduler, CancelsSends)
    prefill.prefill("p", PROMPT)
    prefill.step()
    prefill.scheduler.cancel_send("unknown")
    assert world.cancelled == other_world.cancelled == []
    prefill.scheduler.cancel_send("p")
    assert world.cancelled == other_world.cancelled == ["p"]
    prefill.step_until(lambda: prefill.is_idle)
    assert prefill.sent == {"p": True}
    assert prefill.num_used_blocks == 0
    prefill.scheduler.cancel_send("p")
    assert world.cancelled == ["p"]


def test_a_queued_request_is_told_to_the_child_whose_parameters_it_brings(make_engine, world, other_world) -> None:
    prefill, decode = make_engine("prefill", "direct", "files"), make_engine("decode", "second", "direct", "files")
    assert isinstance(decode.scheduler, HearsOfQueue)
    params = prefill.prefill("p", PROMPT).kv_transfer_params
    decode.submit("d", PROMPT, params=params)
    assert [request.kv_transfer_params.transfer_id for request in world.queued] == ["engine-0/p"]
    assert other_world.queued == []


def test_children_that_can_wake_the_engine_are_told_how(make_engine, world, other_world) -> None:
    engine = make_engine("decode", "second", "memory", "direct")
    assert isinstance(engine.worker, WakesEngine)
    engine.worker.set_wake_up(wake := lambda: None)
    assert world.wake_ups[-1] is wake
    assert other_world.wake_ups[-1] is wake


def test_two_direct_children_of_one_connector_hold_until_both_are_done(make_engine, world, other_world) -> None:
    prefill, decode = make_engine("prefill", "direct", "second"), make_engine("decode", "second", "direct")
    decision = prefill.prefill("p", PROMPT)
    assert decision.hold_blocks
    assert decision.kv_transfer_params is not None
    assert set(decision.kv_transfer_params.payload) == {"direct", "second"}
    assert fetch(decode, "d", decision.kv_transfer_params) == len(PROMPT)
    assert (world.fetched, other_world.fetched) == (set(), {"engine-0/p"})
    for _ in range(3):
        prefill.step()
    assert prefill.sent == {}
    world.fetched.add("engine-0/p")  # as a real one does when it is told that nothing is to be loaded
    prefill.step_until(lambda: prefill.is_idle)
    assert prefill.sent == {"p": True}
    assert prefill.stats.failures == decode.stats.failures == {}


def test_reports_of_strangers_are_counted_and_go_no_further(make_engine) -> None:
    engine = make_engine("prefill", "direct", "files")
    engine.worker._halves[0]._report.finished_receiving.add("nobody")
    engine.worker._halves[0]._report.finished_sending.add("nobody")
    output = engine.worker.get_finished(["unknown"])
    assert output.finished_receiving == output.finished_sending == set()
    assert output.stats.failures == {"unknown": 3}


# --- patience --------------------------------------------------------------------------------------------------


def test_a_preferred_child_that_asks_for_patience_is_waited_for(make_engine, world) -> None:
    make_engine("prefill", "memory").prefill("p", PROMPT)
    decode = make_engine("decode", "direct", "memory")
    world.is_patient = False
    request = decode.submit("d", PROMPT)
    assert decode.scheduler.get_num_new_matched_tokens(request, 0) == MatchResult(None)
    world.is_patient = True
    assert decode.lookup("d") == MatchResult(len(PROMPT), is_async=True, part="memory")


def test_nobody_waits_for_a_child_behind_the_one_that_has_all(make_engine, world) -> None:
    make_engine("prefill", "memory").prefill("p", PROMPT)
    decode = make_engine("decode", "memory", "direct")
    world.is_patient = False
    request = decode.submit("d", PROMPT)
    assert decode.scheduler.get_num_new_matched_tokens(request, 0).num_tokens == len(PROMPT)
    assert world.seen_params == []
    assert decode.scheduler.get_num_new_matched_tokens(decode.submit("e", [9] * 9), 0) == MatchResult(None)


def test_a_child_whose_lookup_breaks_is_passed_over(make_engine, monkeypatch, caplog) -> None:
    make_engine("prefill", "memory").prefill("p", PROMPT)
    decode = make_engine("decode", "direct", "memory")

    def fail(request, num_computed_tokens):
        raise OSError("link down")

    monkeypatch.setattr(decode.scheduler._halves[0], "get_num_new_matched_tokens", fail)
    assert fetch(decode, "d", None) == len(PROMPT)
    assert "connector direct cannot look up KV: link down; the others are asked" in caplog.text


# --- parameters ------------------------------------------------------------------------------------------------


def test_each_child_gets_its_own_parameters_whatever_the_order(make_engine, world) -> None:
    prefill, decode = make_engine("prefill", "files", "direct"), make_engine("decode", "direct", "files")
    params = prefill.prefill("p", PROMPT).kv_transfer_params
    assert params is not None
    assert (params.connector, params.num_tokens) == ("multi", len(PROMPT))
    assert params.num_bytes == 5 * TINY_SPEC.block_bytes
    params = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=KVTransferParams)
    decode.submit("d", PROMPT, params=params)
    decode.lookup("d")
    assert {seen.transfer_id for seen in world.seen_params} == {"engine-0/p"}


@pytest.mark.parametrize(
    ("connector", "payload", "is_seen"),
    [
        ("direct_double:DirectConnector", {"x": 1}, True),  # a producer with that child alone
        ("nixl", {"x": 1}, False),
        ("multi", {}, False),
        ("multi", {"direct": "junk"}, False),
        ("multi", {"direct": {"connector": 5}}, False),
        ("multi", {"other": {"connector": "direct", "transfer_id": "t"}}, False),
    ],
)
def test_parameters_of_others(make_engine, world, connector: str, payload: dict, is_seen: bool) -> None:
    decode = make_engine("decode", "direct")
    params = KVTransferParams(connector=connector, transfer_id="t", num_tokens=5, payload=payload)
    decode.submit("d", PROMPT, params=params)
    decode.lookup("d")
    assert set(map(type, world.seen_params)) == ({KVTransferParams} if is_seen else {type(None)})


def test_a_plain_producers_parameters_are_the_first_such_childs(make_engine, world, other_world) -> None:
    decode = make_engine("decode", "direct", "second")
    connector = "direct_double:DirectConnector"
    decode.submit("d", PROMPT, params=KVTransferParams(connector=connector, transfer_id="t"))
    decode.lookup("d")
    assert {seen.transfer_id for seen in world.seen_params} == {"t"}
    assert set(other_world.seen_params) == {None}


def test_a_step_shows_children_their_own_parameters(make_engine, monkeypatch) -> None:
    engine = make_engine("prefill", "direct")
    plans = []
    half = engine.scheduler._halves[0]
    monkeypatch.setattr(half, "build_connector_metadata", lambda plan: plans.append(plan) or [])
    part = KVTransferParams(connector="direct", transfer_id="mine")
    params = KVTransferParams(connector="multi", transfer_id="t", payload={"direct": msgspec.to_builtins(part)})
    engine.submit("d", PROMPT, params=params)
    engine.admit("d", 0)
    engine.step({"d": len(PROMPT)})
    assert plans[0].scheduled[0].request.kv_transfer_params == part


# --- construction ----------------------------------------------------------------------------------------------


def test_a_layerwise_child_gets_all_its_calls(make_engine, world) -> None:
    engine = make_engine("prefill", "layerwise")
    engine.step()
    assert world.layer_calls == [("load", 0), ("save", 0), ("load", 1), ("save", 1)]


def test_layers_are_wanted_only_in_steps_in_which_a_child_wants_them(make_engine, world, monkeypatch) -> None:
    engine = make_engine("prefill", "memory", "layerwise")
    half = engine.worker._halves[1]
    monkeypatch.setattr(half, "wants_layers", lambda: False, raising=False)
    engine.step()
    assert world.layer_calls == []
    monkeypatch.setattr(half, "wants_layers", lambda: True)
    engine.step()
    assert len(world.layer_calls) == 4


@pytest.mark.parametrize(
    ("names", "features"),
    [
        (["shared_storage"], {"is_store": True, "layerwise": True, "wakes_engine": True, "ranks": True}),
        (["shared_storage", "memory"], {"is_store": True, "layerwise": True, "ranks": True}),
        (["memory"], {"is_store": True, "ranks": True}),
        (["memory", "direct_double:DirectConnector"], {"cancels_sends": True, "hears_of_queue": True}),
        (["memory", "direct_double:LayerwiseConnector"], {"layerwise": True}),
        (["memory", "null"], {"can_save": False, "can_load": False, "ranks": True}),
    ],
)
def test_features_are_the_intersection_and_what_is_passed_on(names: list[str], features: dict[str, bool]) -> None:
    children = parse_children({"children": [{"connector": name} for name in names]})
    assert compose_features(children) == ConnectorFeatures(**{"can_save": True, "can_load": True, **features})


def test_all_are_closed_whatever_one_does(make_engine, world, monkeypatch) -> None:
    engine = make_engine("prefill", "direct", "files", "layerwise")

    def fail() -> None:
        raise OSError("busy")

    with monkeypatch.context() as patch:
        patch.setattr(engine.worker._halves[1], "close", fail)
        with pytest.raises(OSError, match="busy"):
            engine.worker.close()
    assert world.num_closed == 2
    for _ in range(2):
        engine.worker.close()
        engine.scheduler.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "option children: .*give a list of tables"),
        ({"children": []}, "option children is empty"),
        ({"children": "junk"}, "option children: .*or the same as JSON"),
        ({"children": [{"options": {}}]}, "missing required field `connector`"),
        ({"children": [{"connector": "null", "option": {}}]}, "unknown field `option`"),
        ({"children": [{"connector": "null"}, {"connector": "null"}]}, "two children are called 'null'"),
        ({"children": [{"connector": "nosuch"}]}, "connector 'nosuch' is unknown"),
        ({"children": [{"connector": "null"}], "more": 1}, "option 'more' is unknown; known: children"),
        ({"children": [{"connector": "null", "options": {"x": 1}}]}, "connector null takes no options"),
    ],
)
@pytest.mark.parametrize("build", ["build_scheduler", "build_worker"])
def test_what_is_wrong_with_the_options(build: str, options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        getattr(MultiConnector, build)(build_context(Role.PREFILL, options))


def test_children_as_json_for_command_lines(tmp_path: Path) -> None:
    text = f'[{{"connector": "shared_storage", "options": {{"path": "{tmp_path}"}}}}, {{"connector": "null"}}]'
    worker = MultiConnector.build_worker(build_context(Role.PREFILL, {"children": text}))
    assert len(worker._halves) == 2
    worker.close()


def test_when_a_child_refuses_those_before_it_are_closed(world) -> None:
    children = [
        {"connector": "direct_double:DirectConnector", "options": {"world": world}},
        {"connector": "null", "options": {"x": 1}},
    ]
    with pytest.raises(ConfigError, match="null takes no options"):
        MultiConnector.build_worker(build_context(Role.PREFILL, {"children": children}))
    assert world.num_closed == 1


def test_counters_are_told_by_child_and_in_sum(make_engine) -> None:
    engine = make_engine("prefill", "memory", "files")
    report = engine.worker.get_finished(["nobody"])
    assert set(report.parts) == {"multi", "memory", "shared_storage"}
    assert report.parts["multi"].failures == report.stats.failures == {"unknown": 1}


def test_a_hit_names_the_child_that_has_it_however_deep(memory) -> None:
    inner = {
        "connector": "multi",
        "name": "inner",
        "options": {"children": [{"connector": "null"}, memory_child(memory)]},
    }
    options = {"children": [{"connector": "null"}, inner]}
    make = functools.partial(EngineHarness, MultiConnector)
    prefill, decode = (make(build_context(role, options)) for role in (Role.PREFILL, Role.DECODE))
    prefill.prefill("p", PROMPT)
    loaded = note_loaded_blocks(decode)
    decode.submit("d", PROMPT)
    assert decode.lookup("d").part == "inner/memory"
    decode.admit("d", len(PROMPT))
    decode.step()
    assert loaded == {"inner/memory": 5}
    assert decode.stats.num_blocks_loaded == 5


def test_a_child_that_is_called_as_the_composition_keeps_its_counters(memory) -> None:
    options = {"children": [{**memory_child(memory), "name": "multi"}]}
    engine = EngineHarness(MultiConnector, build_context(Role.PREFILL, options))
    engine.prefill("p", PROMPT)
    assert engine.stats.num_blocks_saved == 5


# --- several ranks ----------------------------------------------------------------------------------------------


def test_what_its_halves_say_crosses_processes(memory) -> None:
    types = MultiConnector.message_types({"children": [memory_child(memory), {"connector": "null"}]})
    codec = MessageCodec(types)
    block = BlockTransfer(b"\0" * 16, S, 7)
    metadata = MultiMetadata(
        (StepMetadata([LoadRequest("a", S, [block])]), None), [OwnedLoad("a", 0)], [OwedSend("b", (0, 1), True)]
    )
    assert codec.decode_metadata(codec.encode_metadata(metadata)) == metadata
    output = ConnectorOutput(messages=[MultiReport(1, ([], []), [ChildSent(0, "b", True, 8)])])
    assert codec.decode_output(codec.encode_output(output)) == output


def test_a_child_for_one_rank_is_refused_for_several(memory, world) -> None:
    children = [memory_child(memory), {"connector": "direct_double:DirectConnector", "options": {"world": world}}]
    context = build_context(Role.PREFILL, {"children": children})
    MultiConnector.build_scheduler(context).close()
    several = dataclasses.replace(context, rank=Rank(0, 2))
    for build in (MultiConnector.build_scheduler, MultiConnector.build_worker):
        with pytest.raises(ConfigError, match="connector direct_double:DirectConnector serves one rank only"):
            build(several)
    with pytest.raises(ConfigError, match="child direct_double:DirectConnector serves one rank only"):
        MultiConnector.message_types(context.options)


def test_a_child_has_sent_when_all_ranks_have(world, double: ModuleType) -> None:
    class RankedDirect(double.DirectConnector):
        features = ConnectorFeatures(can_save=True, can_load=True, ranks=True)
        message_types = classmethod(lambda cls, options: MessageTypes())

    double.RankedDirect = RankedDirect
    options = {"children": [{"connector": "direct_double:RankedDirect", "options": {"world": world}, "name": "d"}]}
    context = dataclasses.replace(build_context(Role.PREFILL, options), rank=Rank(0, 2))
    scheduler = MultiConnector.build_scheduler(context)
    request = KVRequest("a", S, BlockHasher("f").block_keys(range(S), S))
    assert scheduler.request_finished(request, [0], S, handoff=True).hold_blocks
    reports = [MultiReport(rank, ([],), [ChildSent(0, "a", rank == 1, 8)]) for rank in range(2)]
    for report in (reports[0], reports[0], reports[1]):
        scheduler.update_from_output(ConnectorOutput(messages=[report]))
    heard = world.heard_by_scheduler
    assert [output.finished_sending for output in heard] == [set(), set(), {"a"}]
    assert (heard[-1].failed_sending, heard[-1].sent_bytes) == ({"a"}, {"a": 16})
