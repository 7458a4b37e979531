"""Blocks are explained by their holders, and what is not is named."""

from __future__ import annotations

from scripted import SchedulerHarness

from pdserve.connectors.base import FinishDecision, MatchResult
from pdserve.engine.block_accounting import build_report
from pdserve.protocol import KVTransferParams


def test_every_holder_is_named_with_its_purpose() -> None:
    h = SchedulerHarness(max_num_seqs=8)
    h.connector.matches["loads"] = [MatchResult(8, is_async=True)]
    h.connector.matches["orphan"] = [MatchResult(8, is_async=True)]
    params = KVTransferParams(connector="c", transfer_id="t")
    h.connector.decisions["sends"] = FinishDecision(hold_blocks=True, kv_transfer_params=params)
    h.add("loads", range(10, 19), output=[77])
    h.add("orphan", range(30, 39), output=[77])
    h.add("runs", [5, 6, 7])
    h.add("sends", range(50, 55), handoff=True)
    h.step()
    h.scheduler.abort_requests(["orphan"])
    h.now_s = 3.0
    report = build_report(h.kv_cache.pool, h.scheduler.get_holdings())
    assert {x.request_id: (x.purpose, len(x.block_ids), x.held_s) for x in report.holdings} == {
        "loads": ("loading", 2, 3.0),
        "runs": ("running", 1, 3.0),
        "orphan": ("orphaned_load", 2, 3.0),
        "sends": ("sending", 2, 3.0),
    }
    assert report.num_used_blocks == 7
    assert report.mistakes == []
    assert h.scheduler.transfers.count_overdue(2.9) == 3
    assert h.scheduler.transfers.count_overdue(3.1) == 0


def test_a_leak_and_a_double_free_are_named() -> None:
    h = SchedulerHarness()
    h.add("runs", [5, 6, 7])
    h.step()
    (leaked,) = h.kv_cache.pool.allocate(1)
    report = build_report(h.kv_cache.pool, h.scheduler.get_holdings())
    assert report.mistakes == [f"block {leaked} is referenced 1 times, its holders explain 0"]
    h.kv_cache.pool.free([leaked])
    (owned,) = h.kv_cache.get_block_ids("runs")
    h.kv_cache.pool.free([owned])
    report = build_report(h.kv_cache.pool, h.scheduler.get_holdings())
    assert report.mistakes == [f"block {owned} is referenced 0 times, its holders explain 1"]
