from __future__ import annotations

from pdserve.protocol import Role, TimelineEvent
from pdserve.router.timeline import MAX_ENTRIES, RequestTimeline, TimelineEntry, TimelineStore, compute_stages_ms


def entry(name: str, ms: int, choice: int = 0) -> TimelineEntry:
    return TimelineEntry(name, ms * 1_000_000, "x", choice, {})


def test_stages_of_a_handed_off_request() -> None:
    names = [
        ("arrived", 0), ("tokenized", 1), ("prefill_sent", 2), ("queued", 3), ("prefill_started", 5),
        ("prefill_chunk", 8), ("first_token", 10), ("kv_saved", 14), ("decode_sent", 15), ("queued", 16),
        ("kv_load_started", 17), ("kv_loaded", 20), ("first_decode_step", 22), ("finished", 40), ("finished", 41),
    ]  # fmt: skip
    assert compute_stages_ms([entry(name, ms) for name, ms in names]) == {
        "route": 2.0, "queue": 2.0, "prefill": 5.0, "kv_save": 4.0, "kv_load": 3.0, "handoff": 12.0,
        "decode": 19.0, "total": 41.0,
    }  # fmt: skip


def test_stages_of_a_colocated_request() -> None:
    names = [
        ("arrived", 0), ("decode_sent", 1), ("queued", 2), ("prefill_started", 3), ("first_token", 6), ("finished", 9)
    ]  # fmt: skip
    stages = compute_stages_ms([entry(name, ms) for name, ms in names])
    assert stages == {"route": 1.0, "queue": 1.0, "prefill": 3.0, "decode": 3.0, "total": 9.0}


def test_stages_of_nothing() -> None:
    assert compute_stages_ms([]) == {}


def test_bytes_moved_are_those_that_decode_loaded() -> None:
    timeline = RequestTimeline("cmpl-1", "x-1")
    timeline.add_leg(0, Role.PREFILL, "p", "host:1")
    timeline.add_events(0, "p", [TimelineEvent("kv_saved", 1, {"num_bytes": 300})])
    timeline.add_events(0, "d", [TimelineEvent("kv_loaded", 2, {"num_bytes": 200})])
    described = timeline.describe()
    assert (described["kv_bytes_saved"], described["kv_bytes_moved"]) == (300, 200)
    assert described["instances"] == [{"choice": 0, "role": "prefill", "instance_id": "p", "address": "host:1"}]
    assert [event["name"] for event in described["events"]] == ["kv_saved", "kv_loaded", "prefill_sent"]


def test_entries_are_bounded() -> None:
    timeline = RequestTimeline("cmpl-1", "x-1")
    timeline.add_events(0, "p", [TimelineEvent("prefill_chunk", i) for i in range(MAX_ENTRIES + 5)])
    assert len(timeline.entries) == MAX_ENTRIES
    assert timeline.describe()["num_dropped_events"] == 5


def test_store_keeps_the_latest_and_finds_by_either_id() -> None:
    store = TimelineStore(2)
    first, second, third = (RequestTimeline(f"cmpl-{i}", request_id) for i, request_id in enumerate(("a", "b", "b")))
    for timeline in (first, second):
        store.add(timeline)
    assert store.get("cmpl-0") is first
    assert store.get("a") is first
    store.add(third)
    assert store.get("cmpl-0") is None
    assert store.get("a") is None
    assert store.get("b") is third
    assert store.get("cmpl-1") is second
    store.add(RequestTimeline("cmpl-9", "c"))
    assert store.get("b") is third
