"""The scheduler, one decision at a time."""

from __future__ import annotations

import pytest
from scripted import BLOCK_SIZE, EOS, SchedulerHarness

from pdserve.connectors.base import ConnectorOutput, FinishDecision, MatchResult
from pdserve.engine.scheduler_output import ModelRunnerOutput
from pdserve.errors import OverloadedError
from pdserve.protocol import FinishReason, KVTransferParams, RequestOutput

PARAMS = KVTransferParams(connector="scripted", transfer_id="t-1", num_tokens=9)


def test_prompt_is_chunked_by_the_budget_and_samples_once_at_its_end() -> None:
    h = SchedulerHarness(max_num_batched_tokens=4)
    h.add("a", range(10, 20))
    assert [o.new_token_ids for o in h.step()] == []
    assert h.scheduled == {"a": 4}
    h.step()
    assert h.scheduled == {"a": 4}
    assert [o.new_token_ids for o in h.step()] == [[7]]
    assert h.scheduled == {"a": 2}
    h.step()
    assert h.scheduled == {"a": 1}


def test_running_requests_go_before_waiting_ones() -> None:
    h = SchedulerHarness(max_num_batched_tokens=4)
    h.add("a", range(10, 13))
    h.step()
    h.add("b", range(20, 30))
    h.step()
    assert h.scheduled == {"a": 1, "b": 3}


def test_priority_order_and_fcfs_order() -> None:
    fcfs = SchedulerHarness(max_num_seqs=1)
    fcfs.add("late", [5, 6], priority=1)
    fcfs.add("urgent", [5, 7], priority=0)
    fcfs.step()
    assert fcfs.scheduled == {"late": 2}
    priority = SchedulerHarness(max_num_seqs=1, policy="priority")
    priority.add("late", [5, 6], priority=1)
    priority.add("urgent", [5, 7], priority=0)
    priority.step()
    assert priority.scheduled == {"urgent": 2}


def test_second_request_hits_the_first_ones_full_blocks_but_computes_the_last_token() -> None:
    h = SchedulerHarness()
    prompt = list(range(10, 10 + 2 * BLOCK_SIZE))
    h.add("a", prompt, max_tokens=1)
    h.step()
    h.add("b", prompt, max_tokens=1)
    (output,) = h.step()
    assert h.scheduled == {"b": BLOCK_SIZE}
    assert output.num_cached_tokens == BLOCK_SIZE


def test_other_salt_never_hits() -> None:
    h = SchedulerHarness()
    prompt = list(range(10, 30))
    h.add("a", prompt, max_tokens=1, salt="x")
    h.step()
    h.add("b", prompt, max_tokens=1, salt="y")
    h.step()
    assert h.scheduled == {"b": 20}


def test_preemption_takes_the_newest_and_the_rest_goes_on() -> None:
    h = SchedulerHarness(num_blocks=6, prefix_caching=False)
    h.add("a", range(10, 18), max_tokens=12)
    h.add("b", range(30, 38), max_tokens=12)
    outputs = h.run_until_idle()
    tokens = [o.request_id for o in outputs for _ in o.new_token_ids]
    assert (tokens.count("a"), tokens.count("b")) == (12, 12)
    assert h.stats.preemptions._value.get() >= 1
    assert h.num_used_blocks == 0
    order = [o.request_id for o in outputs if o.finish_reason]
    assert order == ["a", "b"]


def preempt_inside_the_prompt(**sampling: object) -> tuple[SchedulerHarness, list[RequestOutput]]:
    """A request that has computed 11 of its prompt's 20 tokens when its blocks are taken, and goes on to its end."""
    h = SchedulerHarness(num_blocks=7, max_num_batched_tokens=2)
    h.add("a", range(10, 14), max_tokens=20)
    h.step()
    h.step()
    h.add("b", range(30, 50), max_tokens=1, **sampling)
    outputs: list[RequestOutput] = []
    while not any(output.finish_reason for output in outputs if output.request_id == "b"):
        outputs += h.step()
    assert h.stats.preemptions._value.get() == 1
    return h, [output for output in outputs if output.request_id == "b"]


def test_a_prompt_that_is_computed_twice_has_its_logprobs_once() -> None:
    _, (output,) = preempt_inside_the_prompt(prompt_logprobs=0)
    assert output.prompt_logprobs is not None
    assert [entry.token_id for entry in output.prompt_logprobs] == list(range(1, 20))


def test_tokens_that_were_computed_before_a_preemption_are_not_cached_ones() -> None:
    h, (output,) = preempt_inside_the_prompt()
    assert h.stats.prefix_hits._value.get() > 0
    assert output.num_cached_tokens == 0


def test_finish_reasons() -> None:
    h = SchedulerHarness()
    h.add("eos", [5])
    h.add("ignores", [5, 5], ignore_eos=True, max_tokens=1)
    h.add("stop", [5, 5, 5], stop_token_ids=(9,))
    h.add("length", [5, 5, 5, 5], max_tokens=1)
    h.add("leg", [5, 5, 5, 5, 5], handoff=True)
    h.add("leg_at_end", [5, 5, 5, 5, 5, 5], handoff=True, max_tokens=1)
    outputs = {o.request_id: o for o in h.step(eos=EOS, ignores=EOS, stop=9)}
    assert {r: o.finish_reason for r, o in outputs.items()} == {
        "eos": FinishReason.STOP,
        "ignores": FinishReason.LENGTH,
        "stop": FinishReason.STOP,
        "length": FinishReason.LENGTH,
        "leg": FinishReason.HANDOFF,
        "leg_at_end": FinishReason.LENGTH,
    }
    assert outputs["stop"].stop_token_id == 9
    assert outputs["eos"].stop_token_id is None
    assert h.num_used_blocks == 0
    assert h.scheduler.live_request_ids == []


def test_handed_over_request_computes_only_its_first_token_as_input() -> None:
    h = SchedulerHarness()
    h.connector.matches["d"] = [MatchResult(9, is_async=True)]
    request = h.add("d", range(10, 19), output=[77], params=PARAMS, max_tokens=3)
    h.step()
    assert h.scheduled == {}
    assert h.connector.allocated == [("d", (0, 1, 2), 9)]
    h.step(ConnectorOutput(finished_receiving={"d"}))
    outputs = h.step()
    assert h.scheduled == {"d": 1}
    assert request.num_computed_tokens == 10
    assert outputs[0].num_cached_tokens == 9
    assert outputs[0].num_external_tokens == 9
    assert [e.name for e in outputs[0].events] == ["queued", "kv_load_started", "kv_loaded", "first_decode_step"]
    (last,) = h.step()
    assert last.finish_reason is FinishReason.LENGTH  # 77, 7, 7: max_tokens counts the first leg's token


def test_the_first_decode_step_is_noted_when_it_begins_also_behind_a_prompt_that_is_computed_again() -> None:
    h = SchedulerHarness(max_num_batched_tokens=8)
    h.connector.matches["d"] = [MatchResult(9, is_async=True)]
    requests = [h.add("d", range(10, 19), output=[77]), h.add("again", range(30, 39), output=[77])]
    seen: dict[str, list[list[str]]] = {"d": [], "again": []}
    for report in (ConnectorOutput(finished_receiving={"d"}), None, None):
        step = h.scheduler.schedule()
        for request in requests:
            seen[request.request_id].append([event.name for event in request.take_events()])
        result = ModelRunnerOutput(connector_output=report or ConnectorOutput())
        result.sampled_token_ids = {
            item.request_id: 7 for item in step.scheduled if item.num_computed_tokens + item.num_scheduled_tokens >= 10
        }
        h.scheduler.update_from_output(step, result)
    assert seen["d"] == [["queued", "kv_load_started"], ["kv_loaded", "first_decode_step"], []]
    assert seen["again"] == [["queued", "prefill_started"], ["prefill_chunk", "first_decode_step"], []]


def test_others_run_while_a_load_is_under_way() -> None:
    h = SchedulerHarness()
    h.connector.matches["d"] = [MatchResult(8, is_async=True)]
    h.add("d", range(10, 19), output=[77])
    h.add("x", [5, 6])
    h.step()
    assert h.scheduled == {"x": 2}
    h.step()
    assert h.scheduled == {"x": 1}


def test_whole_prompt_match_leaves_one_token_to_compute() -> None:
    h = SchedulerHarness()
    h.connector.matches["p"] = [MatchResult(8, is_async=True)]
    h.add("p", range(10, 18))
    h.step()
    assert h.connector.allocated[-1][2] == 7
    h.step(ConnectorOutput(finished_receiving={"p"}))
    h.step()
    assert h.scheduled == {"p": 1}


def test_lookup_that_asks_for_patience_is_asked_again_and_others_overtake() -> None:
    h = SchedulerHarness()
    h.connector.matches["d"] = [MatchResult(None), MatchResult(None), MatchResult(0)]
    h.add("d", range(10, 19))
    h.add("x", [5, 6])
    h.step()
    assert h.scheduled == {"x": 2}
    h.step()
    h.step()
    assert h.scheduled == {"x": 1, "d": 9}


def test_failed_allocation_asks_again_and_counts_once() -> None:
    h = SchedulerHarness(num_blocks=4)
    h.add("big", range(10, 22), max_tokens=3)
    h.step()
    h.connector.matches["d"] = [MatchResult(4, is_async=True)]
    h.add("d", range(40, 49), output=[77], max_tokens=2)
    for _ in range(2):
        h.step()
        assert [a for a in h.connector.allocated if a[0] == "d"] == []
    h.run_until_idle()
    h.step(ConnectorOutput(finished_receiving={"d"}))
    h.run_until_idle()
    assert len([a for a in h.connector.allocated if a[0] == "d"]) == 1
    assert h.num_used_blocks == 0


def test_partial_load_keeps_whole_blocks_and_computes_the_rest() -> None:
    h = SchedulerHarness()
    h.connector.matches["d"] = [MatchResult(9, is_async=True)]
    h.add("d", range(10, 19), output=[77])
    h.step()
    h.step(ConnectorOutput(failed_receiving={"d": 6}))
    (output,) = h.step()
    assert h.scheduled == {"d": 6}  # tokens 4 to 8 of the prompt and the first leg's token
    assert output.num_external_tokens == 4


def test_failed_load_ends_the_request_where_the_policy_says_so() -> None:
    h = SchedulerHarness(kv_load_failure_policy="fail")
    h.connector.matches["d"] = [MatchResult(9, is_async=True)]
    h.add("d", range(10, 19), output=[77])
    h.step()
    (output,) = h.step(ConnectorOutput(failed_receiving={"d": 0}))
    assert output.finish_reason is FinishReason.ERROR
    assert output.error is not None
    assert output.error.code == "kv_transfer_failed"
    assert h.num_used_blocks == 0


@pytest.mark.parametrize("good", [True, False])
def test_abort_during_a_load_keeps_the_blocks_until_its_report(good: bool) -> None:
    h = SchedulerHarness()
    h.connector.matches["d"] = [MatchResult(9, is_async=True)]
    h.add("d", range(10, 19), output=[77])
    h.step()
    h.scheduler.abort_requests(["d"])
    h.step()
    assert h.num_used_blocks == 3
    assert h.scheduler.has_transfers
    report = ConnectorOutput(finished_receiving={"d"}) if good else ConnectorOutput(failed_receiving={"d": 0})
    assert h.step(report) == []
    assert h.num_used_blocks == 0
    assert not h.scheduler.has_transfers


def test_late_duplicate_and_unknown_reports_change_nothing() -> None:
    h = SchedulerHarness()
    h.connector.matches["d"] = [MatchResult(9, is_async=True)]
    h.add("d", range(10, 19), output=[77], max_tokens=3)
    h.step()
    h.step(ConnectorOutput(finished_receiving={"d", "nobody"}, finished_sending={"nobody"}))
    h.step(ConnectorOutput(finished_receiving={"d"}, finished_sending={"d"}))
    h.run_until_idle()
    assert h.num_used_blocks == 0
    assert h.stats.transfers.failures.labels("null", "late_report")._value.get() == 4


def test_held_blocks_come_back_when_they_are_reported_sent() -> None:
    h = SchedulerHarness()
    h.connector.decisions["p"] = FinishDecision(hold_blocks=True, kv_transfer_params=PARAMS)
    h.add("p", range(10, 19), handoff=True)
    (output,) = h.step()
    assert output.finish_reason is FinishReason.HANDOFF
    assert output.kv_transfer_params == PARAMS
    assert h.num_used_blocks == 3
    h.step()
    assert h.last_step is not None
    assert h.last_step.finished_sending_due == ("p",)
    h.step(ConnectorOutput(finished_sending={"p"}))
    assert h.num_used_blocks == 0


@pytest.mark.parametrize("failed", [False, True])
def test_hand_off_is_announced_when_the_kv_is_saved(failed: bool) -> None:
    h = SchedulerHarness()
    h.connector.decisions["p"] = FinishDecision(kv_transfer_params=PARAMS, announce_when_sent=True)
    h.add("p", range(10, 19), handoff=True)
    (first,) = h.step()
    assert (first.new_token_ids, first.finish_reason) == ([7], None)
    assert h.num_used_blocks == 0
    report = ConnectorOutput(finished_sending={"p"}, failed_sending={"p"} if failed else set())
    (last,) = h.step(report)
    assert last.finish_reason is FinishReason.HANDOFF
    assert last.new_token_ids == []
    assert last.kv_transfer_params == (None if failed else PARAMS)


def test_request_that_ends_with_its_first_token_is_not_offered() -> None:
    h = SchedulerHarness()
    h.add("p", range(10, 19), handoff=True)
    (output,) = h.step(p=EOS)
    assert output.finish_reason is FinishReason.STOP
    assert h.connector.finished == [("p", 9, False)]


def test_transfer_params_are_shown_to_the_connector_for_one_load_only() -> None:
    h = SchedulerHarness(num_blocks=6, prefix_caching=False)
    h.add("a", range(10, 18), max_tokens=12)
    h.step()
    h.connector.matches["d"] = [MatchResult(8, is_async=True)]
    h.add("d", range(30, 38), output=[77], params=PARAMS, max_tokens=12)
    h.step()
    h.step(ConnectorOutput(finished_receiving={"d"}))
    h.connector.seen_params.clear()
    h.run_until_idle()
    assert h.stats.preemptions._value.get() >= 1
    assert set(h.connector.seen_params) == {None}
    assert h.num_used_blocks == 0


def test_abort_at_any_moment_frees_everything() -> None:
    for moment in range(4):
        h = SchedulerHarness(max_num_batched_tokens=4)
        h.add("a", range(10, 20))
        for _ in range(moment):
            h.step()
        h.scheduler.abort_requests(["a", "never there"])
        h.step()
        assert h.num_used_blocks == 0
        assert [f[0] for f in h.connector.finished] == ["a"]


def test_deadline_ends_a_request_wherever_it_stands() -> None:
    h = SchedulerHarness(max_num_seqs=1)
    h.add("runs", [5, 6], timeout_s=1.0)
    h.add("waits", [5, 6], timeout_s=2.0)
    h.step()
    h.now_s = 1.5
    first = h.step()[0]
    assert (first.request_id, first.finish_reason) == ("runs", FinishReason.TIMEOUT)
    h.now_s = 2.5
    (output,) = h.step()
    assert (output.request_id, output.finish_reason) == ("waits", FinishReason.TIMEOUT)
    assert h.num_used_blocks == 0


def test_full_queue_is_refused_and_nothing_is_lost() -> None:
    h = SchedulerHarness(max_queue_len=1)
    h.add("a", [5])
    with pytest.raises(OverloadedError, match="queue is full"):
        h.add("b", [5])
    assert len(h.run_until_idle()) == 100


def test_loaded_requests_cannot_block_one_another_for_ever() -> None:
    h = SchedulerHarness(num_blocks=4, prefix_caching=False)
    for name, start in (("d", 10), ("e", 30)):
        h.connector.matches[name] = [MatchResult(8, is_async=True)]
        h.add(name, range(start, start + 7), output=[77], max_tokens=8)
    h.step()
    h.step(ConnectorOutput(finished_receiving={"d", "e"}))
    outputs = h.run_until_idle()
    assert sorted(o.request_id for o in outputs if o.finish_reason) == ["d", "e"]
    assert h.num_used_blocks == 0


def test_loaded_kv_that_is_given_up_for_another_request_is_not_counted() -> None:
    h = SchedulerHarness(num_blocks=5, prefix_caching=False)
    for name, start in (("d", 10), ("e", 30)):
        h.connector.matches[name] = [MatchResult(8, is_async=True)]
        h.add(name, range(start, start + 8), output=[77], max_tokens=8)
    h.step()
    h.step(ConnectorOutput(finished_receiving={"d", "e"}))
    outputs = h.run_until_idle()
    counted = {o.request_id: o.num_external_tokens for o in reversed(outputs)}  # by each one's first output
    assert counted == {"d": 8, "e": 0}


@pytest.mark.parametrize("length", [4, 5, 8, 11])
def test_full_hit_is_a_hit_rate_of_one_and_is_asked_once(length: int) -> None:
    h = SchedulerHarness()
    prompt = list(range(10, 10 + length))
    h.add("cold", prompt, max_tokens=1)
    h.step()
    cold_queries = h.stats.prefix_queries._value.get()
    assert h.stats.prefix_hits._value.get() == 0
    h.add("warm", prompt, max_tokens=1)
    h.step()
    warm_queries = h.stats.prefix_queries._value.get() - cold_queries
    assert warm_queries == cold_queries == (length - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert h.stats.prefix_hits._value.get() == warm_queries


def test_tokens_from_outside_are_counted_as_asked_and_found() -> None:
    h = SchedulerHarness()
    h.connector.matches["d"] = [MatchResult(9, is_async=True)]
    h.add("d", range(10, 19), output=[77])
    h.step()
    assert h.stats.external_queries._value.get() == 9
    assert h.stats.external_hits._value.get() == 9


def test_requests_held_up_by_a_connector_do_not_make_the_engine_spin() -> None:
    h = SchedulerHarness()
    h.connector.matches["d"] = [MatchResult(None)] * 3 + [MatchResult(0)]
    h.add("d", range(10, 19), max_tokens=1)
    assert h.scheduler.has_work
    h.step()
    assert not h.scheduler.has_work
    assert h.scheduler.has_transfers
    h.add("x", [5], max_tokens=1)
    assert h.scheduler.has_work
    outputs = [output for _ in range(4) for output in h.step()]
    assert {o.request_id for o in outputs if o.finish_reason} == {"d", "x"}
    assert not h.scheduler.has_work


def test_a_loaded_request_is_work_at_once() -> None:
    h = SchedulerHarness()
    h.connector.matches["d"] = [MatchResult(8, is_async=True)]
    h.add("d", range(10, 19), output=[77])
    h.step()
    h.step()
    assert not h.scheduler.has_work
    h.step(ConnectorOutput(finished_receiving={"d"}))
    assert h.scheduler.has_work


def test_abort_of_a_held_hand_off_is_passed_to_a_connector_that_cancels() -> None:
    h = SchedulerHarness()
    cancelled: list[str] = []
    h.connector.cancel_send = cancelled.append  # type: ignore[attr-defined]
    h.connector.decisions["p"] = FinishDecision(hold_blocks=True, kv_transfer_params=PARAMS)
    h.add("p", range(10, 19), handoff=True)
    h.step()
    h.scheduler.abort_requests(["p", "p", "unknown"])
    assert cancelled == ["p"]
    assert h.num_used_blocks == 3  # until the connector reports
    h.step(ConnectorOutput(finished_sending={"p"}, failed_sending={"p"}))
    assert h.num_used_blocks == 0


def test_a_connector_that_hears_of_the_queue_is_told_of_hand_offs_once() -> None:
    h = SchedulerHarness(max_num_seqs=1)
    queued: list[str] = []
    h.connector.request_queued = lambda request: queued.append(request.request_id)  # type: ignore[attr-defined]
    h.add("plain", range(10, 19), max_tokens=3)
    h.add("d", range(20, 29), output=[77], params=PARAMS, max_tokens=2)
    assert queued == ["d"]
    for _ in range(6):
        h.step()
    assert [name for name, _, _ in h.connector.allocated] == ["plain", "d"]
    assert queued == ["d"]


def test_abort_of_a_held_hand_off_without_such_a_connector_waits_for_its_report() -> None:
    h = SchedulerHarness()
    h.connector.decisions["p"] = FinishDecision(hold_blocks=True, kv_transfer_params=PARAMS)
    h.add("p", range(10, 19), handoff=True)
    h.step()
    h.scheduler.abort_requests(["p"])
    h.step(ConnectorOutput(finished_sending={"p"}))
    assert h.num_used_blocks == 0
