from __future__ import annotations

import concurrent.futures
import logging
import os
import time

import pytest

from pdserve.engine.server import instance_server
from pdserve.engine.server.inbox import Drain, Page, Scrape
from pdserve.protocol import (
    MAX_FRAME_BYTES,
    AbortRequests,
    CacheEvents,
    FinishReason,
    Goodbye,
    Heartbeat,
    Ready,
    Refused,
    RequestOutput,
)


def test_a_request_comes_back_token_by_token_under_the_routers_own_id(start_instance) -> None:
    instance = start_instance()
    router = instance.connect()
    ready = router.open()
    assert (ready.session, ready.instance_id, ready.generation) == (router.session, "prefill-0", "g1")
    router.add("r1", [10], max_tokens=3)
    assert router.finish("r1") == [
        RequestOutput(request_id="r1", new_token_ids=[11]),
        RequestOutput(request_id="r1", new_token_ids=[12]),
        RequestOutput(request_id="r1", new_token_ids=[13], finish_reason=FinishReason.LENGTH),
    ]


def test_two_routers_may_use_the_same_request_id(start_instance) -> None:
    instance = start_instance()
    one, two = instance.connect("router-a"), instance.connect("router-b")
    one.open()
    two.open()
    one.add("same", [10])
    two.add("same", [50])
    assert one.tokens("same") == [11, 12, 13]
    assert two.tokens("same") == [51, 52, 53]


def test_one_message_carries_a_steps_outputs_of_all_requests(start_instance, wait) -> None:
    instance = start_instance()
    router = instance.connect()
    router.open()
    instance.engine.may_step.clear()
    router.add("r0", [0], max_tokens=1)
    wait(instance.engine.in_step.is_set, "the first request's step")
    for index in range(1, 4):
        router.add(f"r{index}", [10 * index], max_tokens=1)
    wait(lambda: len(instance.inbox) == 3, "the requests behind the first")
    instance.engine.may_step.set()
    for index in range(4):
        router.finish(f"r{index}")
    sizes = [len(message.outputs) for message in router.others if hasattr(message, "outputs")]
    assert sizes == [1, 3]


def test_transfers_are_looked_after_right_behind_the_last_request_and_when_the_engine_is_woken(
    start_instance, wait, monkeypatch
) -> None:
    monkeypatch.setattr(instance_server, "get_transfer_poll_s", lambda waited_s: 3600.0)
    instance = start_instance(session_timeout_s=600.0)  # its end would be a step's reason too
    engine, router = instance.engine, instance.connect()
    router.open()
    engine.may_step.clear()
    router.add("r1", [10], max_tokens=1)
    wait(engine.in_step.is_set, "the request's step")
    engine.holds_kv = True
    engine.may_step.set()
    wait(lambda: engine.num_steps == 2, "the step behind it")
    instance.inbox.wake()
    wait(lambda: engine.num_steps == 3, "the step that the connector asks for")


def test_an_abort_ends_a_request_in_silence(start_instance, wait) -> None:
    instance = start_instance()
    router = instance.connect()
    router.open()
    router.add("r1", [10], max_tokens=10**9)
    router.add("r2", [20], max_tokens=10**9)
    wait(lambda: len(instance.engine.live) == 2)
    router.send(AbortRequests(["r1", "unknown"]))
    wait(lambda: instance.engine.aborted == ["1/r1"], "the abort")
    router.send(AbortRequests(["r2"]))
    wait(lambda: not instance.engine.live, "the second abort")
    assert all(output.finish_reason is None for output in router.outputs.get("r1", []))


def test_refusals_of_the_engine_are_answered_and_leave_nothing(start_instance) -> None:
    instance = start_instance()
    router = instance.connect()
    router.open()
    router.add("empty", [])
    (refusal,) = router.finish("empty")
    assert refusal.finish_reason is FinishReason.ERROR
    assert (refusal.error.code, refusal.error.http_status, refusal.error.param) == ("invalid_value", 400, "prompt")
    assert not refusal.error.retryable
    instance.engine.max_live = 0
    router.add("full", [1])
    (refusal,) = router.finish("full")
    assert (refusal.error.code, refusal.error.http_status) == ("rate_limit_exceeded", 429)
    instance.engine.max_live = 1
    router.add("full", [1])
    assert router.wait_for(type(router.others[-1]), lambda m: getattr(m, "outputs", None)) is not None


def test_a_request_that_trips_the_engine_costs_only_itself(start_instance, caplog) -> None:
    instance = start_instance()
    router = instance.connect()
    router.open()
    router.add("other", [10], max_tokens=50)
    router.add("bad", [666])
    (refusal,) = router.finish("bad")
    assert (refusal.error.code, refusal.error.http_status) == ("engine_error", 500)
    assert router.tokens("other") == list(range(11, 61))
    assert "a mistake in the engine" in caplog.text


def test_the_id_of_a_live_request_is_not_taken_twice(start_instance, wait) -> None:
    instance = start_instance()
    router = instance.connect()
    router.open()
    instance.engine.may_step.clear()
    router.add("r1", [10])
    wait(instance.engine.in_step.is_set)
    router.add("r1", [90])
    wait(lambda: len(instance.inbox) == 1)
    instance.engine.may_step.set()
    assert router.tokens("r1") == [11, 12, 13]
    assert instance.count("refused_requests_total", code="duplicate_request_id") == 1


def test_requests_beyond_the_queue_are_refused_while_a_step_runs(start_instance, wait) -> None:
    instance = start_instance()
    router = instance.connect()
    router.open()
    instance.engine.may_step.clear()
    router.add("first", [1])
    wait(instance.engine.in_step.is_set)
    for index in range(9):
        router.add(f"r{index}", [1])
    (refusal,) = router.finish("r8")
    assert refusal.error.code == "rate_limit_exceeded"
    instance.engine.may_step.set()
    assert [router.tokens(f"r{index}") for index in range(8)] == [[2, 3, 4]] * 8


def test_heartbeats_and_new_sessions_go_on_while_a_step_is_slow(start_instance, wait) -> None:
    instance = start_instance()
    router = instance.connect()
    router.open()
    instance.engine.may_step.clear()
    router.add("r1", [10])
    wait(instance.engine.in_step.is_set)
    for _ in range(3):
        assert router.wait_for(Heartbeat).generation == "g1"
    assert instance.connect("router-b").open().instance_id == "prefill-0"
    assert instance.engine.num_steps == 0


def test_a_new_session_of_a_router_aborts_what_the_older_one_left(start_instance, wait) -> None:
    instance = start_instance()
    older = instance.connect("router-a")
    older.open()
    older.add("r1", [10], max_tokens=10**9)
    wait(lambda: instance.engine.live)
    newer = instance.connect("router-a")
    newer.open()
    wait(lambda: instance.engine.aborted == ["1/r1"])
    newer.add("r1", [20])
    assert newer.tokens("r1") == [21, 22, 23]


def test_a_new_session_on_the_same_connection_replaces_the_older(start_instance, wait) -> None:
    instance = start_instance()
    router = instance.connect()
    router.open()
    router.add("r1", [10], max_tokens=10**9)
    wait(lambda: instance.engine.live)
    router.session = "second"
    assert router.open().session == "second"
    wait(lambda: instance.engine.aborted == ["1/r1"])


def test_goodbye_aborts(start_instance, wait) -> None:
    instance = start_instance()
    router = instance.connect()
    router.open()
    router.add("r1", [10], max_tokens=10**9)
    wait(lambda: instance.engine.live)
    router.send(Goodbye())
    wait(lambda: not instance.engine.live)
    assert instance.count("sessions_ended_total", reason="goodbye") == 1


def test_a_silent_session_is_aborted_and_its_late_hello_refused(start_instance, wait) -> None:
    instance = start_instance(session_timeout_s=1.0)
    router = instance.connect()
    router.open()
    router.add("r1", [10], max_tokens=10**9)
    wait(lambda: instance.engine.live)
    wait(lambda: not instance.engine.live, "the abort of a silent session")
    router.hello()
    assert "has ended" in router.wait_for(Refused).reason
    router.session = "another"
    assert router.open().session == "another"


def test_a_session_that_says_hello_stays(start_instance) -> None:
    instance = start_instance(session_timeout_s=1.5)
    router = instance.connect()
    router.open()
    opened_s = time.monotonic()
    while time.monotonic() < opened_s + 2.0:
        router.wait_for(Heartbeat)
        router.hello()
    router.add("r1", [10])
    assert router.tokens("r1") == [11, 12, 13]
    assert instance.count("sessions_opened_total") == 1


def test_another_protocol_version_is_refused(start_instance) -> None:
    router = start_instance().connect()
    router.hello(protocol_version=999)
    assert "999" in router.wait_for(Refused).reason


def test_a_request_before_any_hello_gets_a_retryable_answer(start_instance) -> None:
    instance = start_instance()
    router = instance.connect()
    router.add("r1", [10])
    (answer,) = router.finish("r1")
    assert (answer.error.http_status, answer.error.retryable) == (503, True)
    assert instance.count("dropped_frames_total", kind="no_session") == 1


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        os.urandom(1000),
        b"\x91" * 100_000,
        b"\x81\xa4type\xa3add",
        b"\x82\xa4type\xa5hello\xa9router_id\xa1\xff",
    ],
)
def test_garbage_is_dropped_and_the_connection_goes_on(start_instance, frame: bytes) -> None:
    instance = start_instance()
    router = instance.connect()
    router.open()
    for _ in range(20):
        router.socket.send(frame)
    router.add("r1", [10])
    assert router.tokens("r1") == [11, 12, 13]
    assert instance.count("dropped_frames_total", kind="malformed") == 20


def test_messages_of_several_frames_are_dropped(start_instance) -> None:
    instance = start_instance()
    router = instance.connect()
    router.open()
    router.socket.send_multipart([b"a", b"b"])
    router.add("r1", [10])
    assert router.tokens("r1") == [11, 12, 13]
    assert instance.count("dropped_frames_total", kind="malformed") == 1


def test_an_oversize_frame_is_dropped_and_one_far_beyond_cuts_only_its_own_connection(start_instance, wait) -> None:
    instance = start_instance()
    good, bad = instance.connect("router-a"), instance.connect("router-b")
    good.open()
    bad.open()
    bad.socket.send(bytes(MAX_FRAME_BYTES + 1))
    wait(lambda: instance.count("dropped_frames_total", kind="oversize") == 1)
    bad.add("r1", [20])
    assert bad.tokens("r1") == [21, 22, 23]
    bad.socket.send(bytes(2 * MAX_FRAME_BYTES + 1))
    good.add("r1", [10])
    assert good.tokens("r1") == [11, 12, 13]


def test_one_warning_for_many_bad_frames(start_instance, wait, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "pdserve")
    instance = start_instance()
    router = instance.connect()
    router.open()
    for _ in range(50):
        router.socket.send(b"\xc1")
    wait(lambda: instance.count("dropped_frames_total", kind="malformed") == 50)
    assert len([record for record in caplog.records if "no message of the protocol" in record.message]) == 1


def test_a_router_that_vanished_is_noticed_at_the_next_send(start_instance, wait) -> None:
    instance = start_instance()
    router = instance.connect()
    router.open()
    router.add("r1", [10], max_tokens=10**9)
    wait(lambda: instance.engine.live)
    router.socket.close()
    wait(lambda: not instance.engine.live)
    assert instance.count("sessions_ended_total", reason="disconnected") == 1


def test_a_router_that_does_not_read_is_given_up(start_instance, wait) -> None:
    instance = start_instance(session_timeout_s=60.0)
    instance.engine.step_s = 0
    router = instance.connect()
    router.open()
    router.add("r1", [10], max_tokens=10**9)
    wait(lambda: not instance.engine.live and instance.engine.num_steps > 0, "giving up")
    assert instance.count("sessions_ended_total", reason="slow") == 1


def test_draining_refuses_new_requests_finishes_the_running_and_ends_with_0(start_instance, wait) -> None:
    instance = start_instance()
    router = instance.connect()
    router.open()
    instance.engine.may_step.clear()
    router.add("running", [10])
    wait(instance.engine.in_step.is_set)
    instance.inbox.put(Drain("test"))
    router.add("late", [20])
    wait(lambda: len(instance.inbox) == 2)
    instance.engine.may_step.set()
    (refusal,) = router.finish("late")
    assert (refusal.error.code, refusal.error.retryable) == ("service_unavailable", True)
    assert router.tokens("running") == [11, 12, 13]
    assert instance.join() == 0


def test_draining_is_told_at_once_and_held_kv_is_served_until_the_deadline(start_instance) -> None:
    instance = start_instance(drain_timeout_s=0.6, heartbeat_interval_s=60.0)
    router = instance.connect()
    router.open()
    instance.engine.holds_kv = True
    instance.inbox.put(Drain("test"))
    router.wait_for(Heartbeat, lambda beat: beat.load.draining)
    assert instance.join() == 0
    assert instance.engine.num_steps > 3


def test_what_runs_at_the_drain_deadline_is_given_back(start_instance, wait) -> None:
    instance = start_instance(drain_timeout_s=0.1)
    router = instance.connect()
    router.open()
    router.add("endless", [10], max_tokens=10**9)
    wait(lambda: instance.engine.live)
    instance.inbox.put(Drain("test"))
    last = router.finish("endless")[-1]
    assert (last.error.code, last.error.retryable) == ("service_unavailable", True)
    assert instance.join() == 0


def test_an_engine_that_fails_gives_its_requests_back_and_ends_with_1(start_instance, wait, caplog) -> None:
    instance = start_instance()
    router = instance.connect()
    router.open()
    instance.engine.may_step.clear()
    router.add("r1", [10])
    wait(instance.engine.in_step.is_set)
    instance.engine.fails_with = RuntimeError("out of luck")
    instance.engine.may_step.set()
    last = router.finish("r1")[-1]
    assert (last.error.code, last.error.http_status, last.error.retryable) == ("engine_error", 500, True)
    assert instance.join() == 1
    assert "out of luck" in caplog.text


def test_metrics_are_rendered_on_the_engines_thread(start_instance) -> None:
    instance = start_instance()
    scrape = Scrape(Page.METRICS, concurrent.futures.Future())
    instance.inbox.put(scrape)
    body = scrape.answer.result(5).decode()
    assert "engine_metrics 1" in body
    assert "pdserve_server_sessions 0.0" in body


def test_an_idle_engine_is_not_stepped(start_instance) -> None:
    instance = start_instance()
    router = instance.connect()
    router.open()
    for _ in range(3):
        router.wait_for(Heartbeat)
    assert instance.engine.num_steps == 0


def test_ready_is_sent_once_a_session(start_instance) -> None:
    router = start_instance().connect()
    router.open()
    router.hello()
    router.wait_for(Heartbeat)
    router.wait_for(Heartbeat)
    assert not [message for message in router.others if isinstance(message, Ready)]


def test_cache_events_go_to_who_asked_for_them(start_instance, wait) -> None:
    instance = start_instance()
    listener, other = instance.connect("router-a"), instance.connect("router-b")
    other.open()
    assert not instance.engine.listening
    listener.hello(wants_cache_events=True)
    assert listener.wait_for(CacheEvents) == CacheEvents(stored=[b"old"], replaces_all=True)
    instance.engine.cache_events = CacheEvents(stored=[b"new"], evicted=[b"old"])
    listener.add("r1", [10], max_tokens=1)
    assert listener.wait_for(CacheEvents) == CacheEvents(stored=[b"new"], evicted=[b"old"])
    other.add("r1", [10], max_tokens=1)
    assert other.tokens("r1") == [11]
    assert not [message for message in other.others if isinstance(message, CacheEvents)]
    listener.send(Goodbye())
    wait(lambda: not instance.engine.listening, "the listener's leaving")
