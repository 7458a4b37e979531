"""One request as its client saw it. Knows neither how it was sent nor what many of them amount to."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request was lost.

    Attributes:
        kind: a short stable name to count by, such as ``http_503`` or ``cut_short``.
        message: what happened, for people.
    """

    kind: str
    message: str


@dataclass(slots=True)
class RequestSample:
    """One request. Times are seconds since the run began.

    Attributes:
        index: its place in the workload.
        due_s: when it should have been sent.
        sent_s: when it was sent.
        clock_s: where its latency counts from: ``due_s`` under timed arrivals, so that waiting for one of the
            client's slots is waiting; ``sent_s`` in a burst, where the cap on concurrency is the load itself.
        event_times_s: arrival of each event that carried text, oldest first.
        end_s: arrival of its last event, or the moment it was lost.
        num_prompt_tokens: as the server counted them; None where it says nothing.
        num_output_tokens: as the server counted them, else the number of events.
        has_usage: whether the server counted.
        failure: set when it was lost; its times say nothing then.
    """

    index: int
    due_s: float
    sent_s: float
    clock_s: float
    event_times_s: list[float] = field(default_factory=list)
    end_s: float = 0.0
    num_prompt_tokens: int | None = None
    num_output_tokens: int = 0
    has_usage: bool = False
    failure: Failure | None = None

    @property
    def ttft_s(self) -> float:
        """Time to the first token."""
        return self.event_times_s[0] - self.clock_s

    @property
    def e2e_s(self) -> float:
        """Time to the answer's end."""
        return self.end_s - self.clock_s

    @property
    def itls_s(self) -> list[float]:
        """Time between each two events: what a reader sees as a pause."""
        return [later - earlier for earlier, later in pairwise(self.event_times_s)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time for each token after the first; None for answers of one token."""
        if self.num_output_tokens < 2:
            return None
        return (self.event_times_s[-1] - self.event_times_s[0]) / (self.num_output_tokens - 1)
