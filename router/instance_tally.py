"""What one instance did for this router since its session began, counted from what it is sent and what comes back."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pdserve.protocol import AddRequest, RequestOutput

_NS_PER_MS = 1e6


@dataclass(slots=True)
class InstanceTally:
    """Counts of one session. Lives on the event loop.

    Attributes:
        num_legs: legs sent.
        num_tokens: tokens it made.
        num_hittable_tokens: tokens that legs with a first token came with, each leg's last one left out: that one
            is always computed, so that a full hit is a rate of 1.
        num_cached_tokens: the part of them that it did not compute: prefix hits and loaded KV.
        num_external_tokens: the part of those that its connector loaded.
        least_event_age_ms: the least time from an event's time stamp, by the instance's clock, to its arrival, by
            this machine's. A little above 0 where the clocks agree; None before the first event.
    """

    num_legs: int = 0
    num_tokens: int = 0
    num_hittable_tokens: int = 0
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    least_event_age_ms: float | None = None
    _num_given: dict[str, int] = field(default_factory=dict)
    """Tokens that each leg without a first token came with."""

    def note_sent(self, request: AddRequest) -> None:
        """A leg was sent."""
        self.num_legs += 1
        self._num_given[request.request_id] = len(request.prompt_token_ids) + len(request.output_token_ids)

    def note_output(self, output: RequestOutput) -> None:
        """One of the running legs has an output."""
        if output.new_token_ids or output.finish_reason is not None:
            num_given = self._num_given.pop(output.request_id, None)
            if num_given is not None and output.new_token_ids:
                self.num_hittable_tokens += num_given - 1
                self.num_cached_tokens += output.num_cached_tokens
                self.num_external_tokens += output.num_external_tokens
        self.num_tokens += len(output.new_token_ids)
        if output.events:
            age_ms = round((time.time_ns() - output.events[-1].time_ns) / _NS_PER_MS, 3)
            if self.least_event_age_ms is None or age_ms < self.least_event_age_ms:
                self.least_event_age_ms = age_ms

    def note_aborted(self, request_id: str) -> None:
        """A leg was given up."""
        self._num_given.pop(request_id, None)
