"""Failures as data: what kept a block from moving, warnings that do not flood, back-off."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

_WARNING_INTERVAL_S = 30.0
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a block did not move.

    Attributes:
        kind: under which it is counted: ``missing``, ``corrupt``, ``timeout``, …
        reason: for people, to follow "because".
    """

    kind: str
    reason: str


class InvalidBlockError(Exception):
    """Stored bytes are not the block that their key promises.

    Args:
        kind: ``truncated``, ``foreign`` (another model, layout, key or format) or ``corrupt``.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class WarningLimiter:
    """One warning line a kind and half a minute; the next line tells how many were kept back. Thread-safe."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float]) -> None:
        self._logger = logger
        self._clock = clock
        self._lock = threading.Lock()
        self._quiet_until: dict[str, float] = {}
        self._suppressed: dict[str, int] = {}

    def warn(self, kind: str, message: str) -> None:
        """Log ``message`` unless one of the same kind was logged a moment ago."""
        with self._lock:
            now = self._clock()
            if now < self._quiet_until.get(kind, now):
                self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
                return
            self._quiet_until[kind] = now + _WARNING_INTERVAL_S
            suppressed = self._suppressed.pop(kind, 0)
        self._logger.warning("%s", message, extra={"kv": {"kind": kind, "suppressed": suppressed}})


class Backoff:
    """Keeps threads from hammering what is broken: after a failure they pause, longer each time. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._pause_s = 0.0
        self._resume_at = 0.0
        self._kind = ""

    def get_reason(self) -> str | None:
        """The kind of the failure that calls for a pause now, or None."""
        with self._lock:
            return self._kind if self._pause_s and self._clock() < self._resume_at else None

    def count_failure(self, kind: str) -> None:
        """It failed; failures during a pause do not lengthen it."""
        with self._lock:
            now = self._clock()
            if self._pause_s and now < self._resume_at:
                return
            self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            self._resume_at = now + self._pause_s
            self._kind = kind

    def count_success(self) -> None:
        """It worked."""
        with self._lock:
            self._pause_s = 0.0
