"""One report of all ranks: every field, in every order of arrival."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from pdserve.connectors.base import ConnectorOutput, ConnectorStats
from pdserve.connectors.output_aggregator import OutputAggregator


def report(**fields: object) -> ConnectorOutput:
    return ConnectorOutput(**fields)


def merge_in_order(
    aggregator: OutputAggregator, reports: Sequence[ConnectorOutput], order: Sequence[int]
) -> list[ConnectorOutput]:
    """Each rank reports in a step of its own; the merged reports."""
    idle = [ConnectorOutput() for _ in reports]
    return [
        aggregator.merge([reports[rank] if rank == speaker else idle[rank] for rank in range(len(reports))])
        for speaker in order
    ]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_load_ends_when_all_ranks_have_said_so(order: Sequence[int]) -> None:
    aggregator = OutputAggregator(3)
    aggregator.expect(["a"], [])
    reports = [report(finished_receiving={"a"}, received_bytes={"a": 10 + rank}) for rank in range(3)]
    *before, last = merge_in_order(aggregator, reports, order)
    assert before == [ConnectorOutput(), ConnectorOutput()]
    assert last == report(finished_receiving={"a"}, received_bytes={"a": 33})


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_load_is_as_good_as_its_worst_share(order: Sequence[int]) -> None:
    aggregator = OutputAggregator(3)
    aggregator.expect(["a"], [])
    reports = [
        report(failed_receiving={"a": 48}, received_bytes={"a": 3}),
        report(finished_receiving={"a"}, received_bytes={"a": 4}),
        report(failed_receiving={"a": 16}),
    ]
    *before, last = merge_in_order(aggregator, reports, order)
    assert before == [ConnectorOutput(), ConnectorOutput()]
    assert last == report(failed_receiving={"a": 16}, received_bytes={"a": 7})


def test_no_good_token_at_all_is_a_count_too() -> None:
    aggregator = OutputAggregator(2)
    aggregator.expect(["a"], [])
    merged = aggregator.merge([report(failed_receiving={"a": 0}), report(failed_receiving={"a": 4})])
    assert merged.failed_receiving == {"a": 0}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_sending_fails_if_it_failed_in_any_rank(order: Sequence[int]) -> None:
    aggregator = OutputAggregator(3)
    aggregator.expect([], ["a"])
    reports = [
        report(finished_sending={"a"}, sent_bytes={"a": 5}),
        report(finished_sending={"a"}, failed_sending={"a"}, sent_bytes={"a": 1}),
        report(finished_sending={"a"}, sent_bytes={"a": 5}),
    ]
    *before, last = merge_in_order(aggregator, reports, order)
    assert before == [ConnectorOutput(), ConnectorOutput()]
    assert last == report(finished_sending={"a"}, failed_sending={"a"}, sent_bytes={"a": 11})


def test_a_sending_that_all_ranks_saved_is_whole() -> None:
    aggregator = OutputAggregator(2)
    aggregator.expect([], ["a"])
    merged = aggregator.merge([report(finished_sending={"a"}), report(finished_sending={"a"}, sent_bytes={"a": 2})])
    assert merged == report(finished_sending={"a"}, sent_bytes={"a": 2})


def test_transfers_of_one_request_in_both_directions_are_told_apart() -> None:
    aggregator = OutputAggregator(2)
    aggregator.expect(["a"], ["a"])
    both = report(finished_receiving={"a"}, finished_sending={"a"})
    assert aggregator.merge([both, report(finished_receiving={"a"})]).finished_sending == set()
    assert aggregator.merge([report(), report(finished_sending={"a"})]).finished_sending == {"a"}


def test_a_rank_that_never_reports_keeps_the_transfer_open() -> None:
    aggregator = OutputAggregator(2)
    aggregator.expect(["a"], ["b"])
    for _ in range(3):
        merged = aggregator.merge([report(failed_receiving={"a": 0}, finished_sending={"b"}), report()])
        assert (merged.failed_receiving, merged.finished_sending) == ({}, set())


def test_a_second_report_of_one_rank_is_not_another_ranks() -> None:
    aggregator = OutputAggregator(2)
    aggregator.expect(["a"], ["b"])
    once = report(finished_receiving={"a"}, finished_sending={"b"}, received_bytes={"a": 8})
    aggregator.merge([once, report()])
    merged = aggregator.merge([once, report()])
    assert merged == report(stats=ConnectorStats(failures={"late_report": 2}))
    merged = aggregator.merge([report(), once])
    assert (merged.finished_receiving, merged.finished_sending) == ({"a"}, {"b"})
    assert merged.received_bytes == {"a": 16}


def test_a_late_report_does_not_end_the_next_load_of_its_request() -> None:
    aggregator = OutputAggregator(2)
    ended = report(finished_receiving={"a"})
    aggregator.expect(["a"], [])
    aggregator.merge([ended, ended])
    assert aggregator.merge([ended, report()]).stats.failures == {"late_report": 1}
    aggregator.expect(["a"], [])
    assert aggregator.merge([report(), ended]).finished_receiving == set()
    assert aggregator.merge([ended, report()]).finished_receiving == {"a"}


def test_unknown_requests_are_counted_and_left_out() -> None:
    aggregator = OutputAggregator(2)
    stranger = report(finished_receiving={"x"}, failed_sending={"y"}, received_bytes={"x": 1}, sent_bytes={"y": 1})
    merged = aggregator.merge([stranger, stranger])
    assert merged == report(stats=ConnectorStats(failures={"late_report": 4}))
    assert aggregator.merge([report(), report()]) == report()


def test_blocks_that_one_rank_could_not_fill_are_invalid_for_all() -> None:
    merged = OutputAggregator(2).merge([report(invalid_block_ids={1, 2}), report(invalid_block_ids={2, 3})])
    assert merged.invalid_block_ids == {1, 2, 3}


def test_messages_follow_each_other_in_the_order_of_ranks() -> None:
    merged = OutputAggregator(2).merge([report(messages=["a", "b"]), report(messages=["c"])])
    assert merged.messages == ["a", "b", "c"]


def test_counters_are_sums_and_so_are_those_of_parts() -> None:
    def count(number: int) -> ConnectorStats:
        return ConnectorStats(number, number, number, number, number, number, {"io": number})

    aggregator = OutputAggregator(2)
    outputs = [
        report(stats=count(3), parts={"x": count(1), "y": count(2)}),
        report(stats=count(4), parts={"x": count(4)}),
    ]
    merged = aggregator.merge([outputs[0], outputs[1]])
    assert merged.stats == count(7)
    assert merged.parts == {"x": count(5), "y": count(2)}
    assert outputs[0].parts == {"x": count(1), "y": count(2)}


def test_what_is_rejected_is_a_part_of_its_own_where_there_are_parts() -> None:
    stranger = report(finished_sending={"x"}, parts={"x": ConnectorStats()})
    merged = OutputAggregator(2).merge([stranger, report()])
    rejected = ConnectorStats(failures={"late_report": 1})
    assert (merged.stats, merged.parts) == (rejected, {"x": ConnectorStats(), "ranks": rejected})
