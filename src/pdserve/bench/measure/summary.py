"""The arithmetic over many requests: distributions, throughput, goodput, and what was lost.

Lost requests are counted and named and take no part in any distribution.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdserve.bench.measure.samples import RequestSample


def percentile(sorted_values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the values lie, with linear interpolation between neighbours.

    Args:
        sorted_values: ascending, at least one.
        share: in [0, 1].
    """
    place = share * (len(sorted_values) - 1)
    below = math.floor(place)
    above = min(below + 1, len(sorted_values) - 1)
    return sorted_values[below] + (sorted_values[above] - sorted_values[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Some values in short."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    maximum: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """The distribution of ``values``; None when there are none."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p90, p99 = (percentile(ordered, share) for share in (0.5, 0.9, 0.99))
        return cls(len(ordered), math.fsum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


@dataclass(frozen=True, slots=True)
class Objective:
    """What makes a request good; a bound of None does not bind.

    Attributes:
        ttft_s: longest time to the first token.
        itl_s: longest time between two tokens that 99 % of the request's own gaps may take.
        tpot_s: longest mean time for each token after the first.
        e2e_s: longest time to the end.
    """

    ttft_s: float | None = None
    itl_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @property
    def is_set(self) -> bool:
        """Whether any bound binds."""
        return any(bound is not None for bound in (self.ttft_s, self.itl_s, self.tpot_s, self.e2e_s))

    def is_met(self, sample: RequestSample) -> bool:
        """Whether a request was good; a lost one never is."""
        if sample.failure is not None:
            return False
        gaps = sorted(sample.itls_s)
        return (
            _is_within(sample.ttft_s, self.ttft_s)
            and _is_within(percentile(gaps, 0.99) if gaps else None, self.itl_s)
            and _is_within(sample.tpot_s, self.tpot_s)
            and _is_within(sample.e2e_s, self.e2e_s)
        )


def _is_within(value: float | None, bound: float | None) -> bool:
    return bound is None or value is None or value <= bound


@dataclass(frozen=True, slots=True)
class LostKind:
    """Requests lost for the same reason, with the first one's words."""

    kind: str
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run of requests amounts to.

    Attributes:
        num_requests: all that were sent.
        num_ok: those answered whole.
        lost: the others, by reason, most frequent first.
        duration_s: from the first request sent to the last one's end.
        num_prompt_tokens: of requests answered whole, as the server counted.
        num_output_tokens: the same.
        num_events: events with text of requests answered whole.
        num_without_usage: requests whose tokens the server did not count; their events stand for them.
        ttft_s: time to first token.
        itl_s: time between two events, over all requests.
        tpot_s: mean time a token after the first, one value a request.
        e2e_s: time to the end.
        send_delay_s: what waiting for one of the client's slots, or its own slowness, added to timed arrivals.
        attainment: share of all requests that met the objective; None without one.
        goodput: good requests a second; None without an objective.
    """

    num_requests: int
    num_ok: int
    lost: tuple[LostKind, ...]
    duration_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_events: int
    num_without_usage: int
    ttft_s: Distribution | None
    itl_s: Distribution | None
    tpot_s: Distribution | None
    e2e_s: Distribution | None
    send_delay_s: Distribution | None
    attainment: float | None
    goodput: float | None

    @property
    def num_lost(self) -> int:
        """Requests that were not answered whole."""
        return self.num_requests - self.num_ok

    @property
    def requests_per_s(self) -> float:
        """Requests answered whole, a second."""
        return self._rate(self.num_ok)

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens of requests answered whole, a second."""
        return self._rate(self.num_output_tokens)

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt and output tokens of requests answered whole, a second."""
        return self._rate(self.num_output_tokens + self.num_prompt_tokens)

    @property
    def tokens_per_event(self) -> float | None:
        """Output tokens that an event carried on average; None without events."""
        return self.num_output_tokens / self.num_events if self.num_events else None

    def _rate(self, count: int) -> float:
        return count / self.duration_s if self.duration_s > 0 else 0.0


def summarise(samples: Sequence[RequestSample], objective: Objective | None = None) -> Summary:
    """Add up a run.

    Args:
        samples: every request of the run, the lost ones too.
        objective: what makes a request good.
    """
    whole = [sample for sample in samples if sample.failure is None]
    begin_s = min((sample.sent_s for sample in samples), default=0.0)
    duration_s = max((sample.end_s for sample in samples), default=begin_s) - begin_s
    attainment = goodput = None
    if objective is not None and objective.is_set and samples:
        num_good = sum(objective.is_met(sample) for sample in samples)
        attainment = num_good / len(samples)
        goodput = num_good / duration_s if duration_s > 0 else 0.0
    return Summary(
        num_requests=len(samples),
        num_ok=len(whole),
        lost=_group_lost(samples),
        duration_s=duration_s,
        num_prompt_tokens=sum(sample.num_prompt_tokens or 0 for sample in whole),
        num_output_tokens=sum(sample.num_output_tokens for sample in whole),
        num_events=sum(len(sample.event_times_s) for sample in whole),
        num_without_usage=sum(not sample.has_usage for sample in whole),
        ttft_s=Distribution.of(sample.ttft_s for sample in whole),
        itl_s=Distribution.of(gap for sample in whole for gap in sample.itls_s),
        tpot_s=Distribution.of(tpot for sample in whole if (tpot := sample.tpot_s) is not None),
        e2e_s=Distribution.of(sample.e2e_s for sample in whole),
        send_delay_s=Distribution.of(sample.sent_s - sample.clock_s for sample in samples),
        attainment=attainment,
        goodput=goodput,
    )


def _group_lost(samples: Iterable[RequestSample]) -> tuple[LostKind, ...]:
    failures = [sample.failure for sample in samples if sample.failure is not None]
    counts = Counter(failure.kind for failure in failures)
    examples = {failure.kind: failure.message for failure in reversed(failures)}
    return tuple(LostKind(kind, count, examples[kind]) for kind, count in counts.most_common())
