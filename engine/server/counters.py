"""What an instance's server counts, apart from its engine. Any thread may count."""

from __future__ import annotations

import logging
import threading
import time

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

_WARNING_INTERVAL_S = 10.0


class ServerCounters:
    """Counters of one server, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.sessions = Gauge("pdserve_server_sessions", "Routers connected", registry=self.registry)
        self.sessions_opened = self._counter("sessions_opened", "Sessions that routers opened")
        self.sessions_ended = self._counter("sessions_ended", "Sessions that ended, by reason", "reason")
        self.dropped_frames = self._counter("dropped_frames", "Frames not understood, by kind", "kind")
        self.refused_requests = self._counter("refused_requests", "Requests refused, by error code", "code")

    def render(self) -> bytes:
        """The exposition format, for ``GET /metrics``."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"pdserve_server_{name}_total", text, labels, registry=self.registry)


class RateLimitedWarning:
    """Logs at most one warning of each kind every ten seconds, however often it is asked to."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._next_s: dict[str, float] = {}

    def warn(self, kind: str, message: str, *args: object) -> None:
        """Log ``message % args`` unless a warning of ``kind`` was logged a short while ago."""
        now_s = time.monotonic()
        with self._lock:
            if now_s < self._next_s.get(kind, 0.0):
                return
            self._next_s[kind] = now_s + _WARNING_INTERVAL_S
        self._logger.warning(message, *args)
