"""Transfers whose requests wait in this engine's queue, and when their producers need a sign of life.

No sockets. Lives on the transfer thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pdserve.connectors.nixl.messages import Endpoint, TransferReference


class QueuedTransfers:
    """The transfers, by name.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._due_at: dict[str, tuple[float, TransferReference]] = {}
        self._next_due = math.inf
        """No later than the earliest of them: the transfer thread asks often, and a queue may be long."""

    def add(self, reference: TransferReference) -> None:
        """Its request waits; the first sign of life is due at once, for nobody knows how long it has waited before."""
        self._next_due = self._clock()
        self._due_at[reference.transfer_id] = (self._next_due, reference)

    def remove(self, reference: TransferReference) -> None:
        """Its request waits no more; one that is not here is ignored."""
        self._due_at.pop(reference.transfer_id, None)
        if not self._due_at:
            self._next_due = math.inf

    @property
    def next_due(self) -> float | None:
        """When `take_due` must be called at the latest; None with nothing queued."""
        return self._next_due if self._due_at else None

    def take_due(self) -> list[list[TransferReference]]:
        """Those whose time has come, those of one producer together; each is due again after its interval."""
        now = self._clock()
        if now < self._next_due:
            return []
        by_producer: dict[Endpoint, list[TransferReference]] = {}
        for transfer_id, (due_at, reference) in self._due_at.items():
            if now >= due_at:
                by_producer.setdefault(reference.producer, []).append(reference)
                self._due_at[transfer_id] = (now + reference.extension_interval_s, reference)
        self._next_due = min((due_at for due_at, _ in self._due_at.values()), default=math.inf)
        return list(by_producer.values())
