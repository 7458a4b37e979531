"""What happened to a request, and when: events of the router and of the instances that took part.

Times are wall-clock nanoseconds of the process where the event happened; between machines they are as good as
the machines' clocks.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from pdserve.protocol import Role, TimelineEvent

MAX_ENTRIES = 2000
_NS_PER_MS = 1e6

_STAGES = (
    ("route", ("arrived",), ("prefill_sent", "decode_sent")),
    ("queue", ("queued",), ("prefill_started", "kv_load_started")),
    ("prefill", ("prefill_started",), ("first_token",)),
    ("kv_save", ("first_token",), ("kv_saved",)),
    ("kv_load", ("kv_load_started",), ("kv_loaded", "kv_load_failed")),
    ("handoff", ("first_token",), ("first_decode_step",)),
    ("decode", ("first_decode_step", "first_token"), ("finished",)),
    ("total", ("arrived",), ("finished",)),
)
"""Name, the events that begin it, the events that end it. ``decode`` begins at the hand-off where there was one."""


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One event of one choice.

    Attributes:
        name: one of ``protocol.TIMELINE_EVENTS``.
        time_ns: wall clock.
        source: ``router``, or the instance's id.
        choice: index of the choice; 0 for what concerns the whole request.
        detail: plain numbers.
    """

    name: str
    time_ns: int
    source: str
    choice: int
    detail: dict[str, float]


@dataclass(slots=True)
class RequestTimeline:
    """One client request's timeline.

    Attributes:
        response_id: the id in the answer.
        request_id: the X-Request-Id of the answer.
        entries: in the order they became known; bounded.
        instances: who took part: choice, role, instance id and address of each leg.
        num_dropped: events beyond the bound.
        summary: plain values that are known at the end.
    """

    response_id: str
    request_id: str
    entries: list[TimelineEntry] = field(default_factory=list)
    instances: list[dict[str, Any]] = field(default_factory=list)
    num_dropped: int = 0
    summary: dict[str, Any] = field(default_factory=lambda: {"status": "running"})

    def add(self, name: str, *, choice: int = 0, **detail: float) -> None:
        """Note an event of the router, now."""
        self._append(TimelineEntry(name, time.time_ns(), "router", choice, detail))

    def add_leg(self, choice: int, role: Role, instance_id: str, address: str) -> None:
        """Note that an instance takes part."""
        self.add(f"{role}_sent", choice=choice)
        if len(self.instances) < MAX_ENTRIES:
            self.instances.append({"choice": choice, "role": str(role), "instance_id": instance_id, "address": address})

    def add_events(self, choice: int, source: str, events: list[TimelineEvent]) -> None:
        """Note what an instance tells."""
        for event in events:
            self._append(TimelineEntry(event.name, event.time_ns, source, choice, event.detail))

    def _append(self, entry: TimelineEntry) -> None:
        if len(self.entries) < MAX_ENTRIES:
            self.entries.append(entry)
        else:
            self.num_dropped += 1

    def describe(self) -> dict[str, Any]:
        """The answer of ``GET /v1/requests/{id}/timeline``.

        ``stages_ms`` are those of the first choice; ``events`` have their time in ms since the first one.
        """
        entries = sorted(self.entries, key=lambda entry: entry.time_ns)
        start_ns = entries[0].time_ns if entries else 0
        return {
            "id": self.response_id,
            "request_id": self.request_id,
            **self.summary,
            "instances": self.instances,
            "kv_bytes_saved": _sum_bytes(entries, "kv_saved"),
            "kv_bytes_moved": _sum_bytes(entries, "kv_loaded"),
            "stages_ms": compute_stages_ms([entry for entry in entries if entry.choice == 0]),
            "events": [
                {
                    "name": entry.name,
                    "source": entry.source,
                    "choice": entry.choice,
                    "time_ns": entry.time_ns,
                    "offset_ms": _to_ms(entry.time_ns - start_ns),
                    "detail": entry.detail,
                }
                for entry in entries
            ],
            "num_dropped_events": self.num_dropped,
        }


class TimelineStore:
    """The last ``capacity`` requests' timelines, by response id and by X-Request-Id. Lives on the event loop."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_id: OrderedDict[str, RequestTimeline] = OrderedDict()
        self._by_request_id: dict[str, RequestTimeline] = {}

    def add(self, timeline: RequestTimeline) -> None:
        """Keep a timeline; the oldest one goes. A request id that is used again names the latest request."""
        self._by_id[timeline.response_id] = timeline
        self._by_request_id[timeline.request_id] = timeline
        while len(self._by_id) > self._capacity:
            _, oldest = self._by_id.popitem(last=False)
            if self._by_request_id.get(oldest.request_id) is oldest:
                del self._by_request_id[oldest.request_id]

    def latest(self, count: int) -> list[RequestTimeline]:
        """The last ``count`` that came, newest first."""
        return list(itertools.islice(reversed(self._by_id.values()), count))

    def get(self, name: str) -> RequestTimeline | None:
        """The timeline of a response id or X-Request-Id."""
        return self._by_id.get(name) or self._by_request_id.get(name)


def compute_stages_ms(entries: list[TimelineEntry]) -> dict[str, float]:
    """Milliseconds of each stage that happened, from one choice's entries in order of time."""
    first: dict[str, int] = {}
    for entry in entries:
        first.setdefault(entry.name, entry.time_ns)
    last_finish = [entry.time_ns for entry in entries if entry.name == "finished"][-1:]
    if last_finish:
        first["finished"] = last_finish[0]
    stages: dict[str, float] = {}
    for name, begins, ends in _STAGES:
        begin = next((first[event] for event in begins if event in first), None)
        after = [first[event] for event in ends if event in first and begin is not None and first[event] >= begin]
        if begin is not None and after:
            stages[name] = _to_ms(min(after) - begin)
    return stages


def _sum_bytes(entries: list[TimelineEntry], name: str) -> int:
    return int(sum(entry.detail.get("num_bytes", 0) for entry in entries if entry.name == name))


def _to_ms(duration_ns: int) -> float:
    return round(duration_ns / _NS_PER_MS, 3)
