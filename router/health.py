"""Whether an instance can be trusted with work: slow start, ejection after faults of its own, return by probe.

Only what is the instance's own fault counts: errors of its engine, and its loss while it had work. A client's
mistake, a full queue, a drain or a deadline says nothing about it.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.protocol import FinishReason, RequestOutput

_MAX_EJECTION_S = 60.0
_FULL = (429, 503)


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """When an instance is passed over.

    Attributes:
        max_faults: so many faults in a row eject it; 0 = never.
        ejection_s: for how long, the first time; doubled each time it fails its probe.
        slow_start_s: a fresh instance takes its full share after this.
    """

    max_faults: int = 3
    ejection_s: float = 5.0
    slow_start_s: float = 5.0


class InstanceHealth:
    """One instance's record. Lives on the event loop; times are the loop's.

    Args:
        settings: the bounds.
    """

    def __init__(self, settings: HealthSettings) -> None:
        self._settings = settings
        self._num_faults = 0
        self._num_ejections = 0
        self._ejected_until_s = 0.0
        self._ready_since_s = 0.0
        self._max_legs = 0

    @property
    def is_ejected(self) -> bool:
        """Whether it has failed too often, and has not passed a probe since."""
        return self._num_ejections > 0

    def note_ready(self, now_s: float, max_num_seqs: int) -> None:
        """A session began; the instance runs at most ``max_num_seqs`` requests at once."""
        self._ready_since_s = now_s
        self._max_legs = max_num_seqs

    def note_output(self, output: RequestOutput, now_s: float) -> None:
        """The last output of a leg came."""
        if output.finish_reason is FinishReason.ERROR:
            if output.error is None or (output.error.http_status >= 500 and output.error.http_status not in _FULL):
                self.note_fault(now_s)
        elif output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.HANDOFF):
            self._num_faults = self._num_ejections = 0

    def note_fault(self, now_s: float) -> None:
        """It failed by itself."""
        self._num_faults += 1
        probe_failed = self.is_ejected and now_s >= self._ejected_until_s
        if self._settings.max_faults and (probe_failed or self._num_faults == self._settings.max_faults):
            duration_s = min(self._settings.ejection_s * 2**self._num_ejections, _MAX_EJECTION_S)
            self._ejected_until_s = now_s + duration_s
            self._num_ejections += 1

    def may_take(self, num_legs: int, now_s: float) -> bool:
        """Whether it is an instance's turn to get one more leg beside ``num_legs``.

        An ejected one gets none until its time is over, and then a single one as its probe. A fresh one gets more
        with time, up to the number it can run at once.
        """
        if self.is_ejected:
            return now_s >= self._ejected_until_s and num_legs == 0
        age_s = now_s - self._ready_since_s
        if age_s >= self._settings.slow_start_s:
            return True
        return num_legs < max(1.0, self._max_legs * age_s / self._settings.slow_start_s)
