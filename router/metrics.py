"""The router's Prometheus metrics, in a registry of their own."""

from __future__ import annotations

import contextlib

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pdserve.protocol import Role
from pdserve.router.prefix_memory import PrefixMode
from pdserve.router.token_metrics import TokenMetrics

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_ITL_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_E2E_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)
_QUEUE_BUCKETS = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PREFIX = "pdserve_router_"


class RouterMetrics:
    """What one router counts. Lives on the event loop."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token", _TTFT_BUCKETS
        )
        self.tokens = TokenMetrics(_PREFIX, _ITL_BUCKETS)
        self.registry.register(self.tokens)
        self.request_latency = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end", _E2E_BUCKETS
        )
        self.queue_time = self._histogram(
            "queue_time_seconds", "How long requests that were let in had waited for it", _QUEUE_BUCKETS
        )
        self.oldest_waiting = self._gauge(
            "oldest_waiting_seconds", "How long the request that waits longest has waited to be let in"
        )
        self.requests = self._counter(
            "requests_total", "Requests ended, by endpoint and outcome", "endpoint", "outcome"
        )
        self.num_running = self._gauge("num_requests_running", "Requests being served")
        self.num_waiting = self._gauge("num_requests_waiting", "Requests waiting to be let in")
        self.prompt_tokens = self._counter("prompt_tokens_total", "Prompt tokens of requests let in")
        self.cached_tokens = self._counter("cached_prompt_tokens_total", "Prompt tokens that were reused")
        self.handoffs = self._counter("handoffs_total", "Prefill legs that ended in a hand-off")
        self.colocated_fallbacks = self._counter(
            "colocated_fallbacks_total", "Requests that decode did whole because the prefill pool was gone"
        )
        self.decode_recomputed_prompts = self._counter(
            "decode_recomputed_prompts_total", "Hand-offs after which decode computed half of the prompt or more"
        )
        self.retries = self._counter("retries_total", "Legs that failed and went on elsewhere, by reason", "reason")
        self.unauthorized_requests = self._counter(
            "unauthorized_requests_total", "Requests without a valid API key, where one is needed"
        )
        self.client_disconnects = self._counter(
            "client_disconnects_total", "Clients that left before their answer ended"
        )
        self._instance_up = self._gauge(
            "instance_up", "Whether an instance is connected and admitted", "role", "address"
        )
        self._prefix_is_exact = self._gauge(
            "instance_prefix_is_exact",
            "Whether an instance tells what its prefix cache holds; 0 = it is estimated by what was sent there",
            "role",
            "address",
        )
        self._instances_refused = self._counter("instances_refused_total", "Instances that were not admitted", "role")
        self._wire_errors = self._counter("wire_errors_total", "Frames from instances that are no message", "role")

    def render(self) -> bytes:
        """The exposition format, for ``GET /metrics``."""
        return generate_latest(self.registry)

    def read_values(self, kind: str) -> dict[str, float]:
        """Every value of a kind, summed over its labels, by its name without prefix and ``_total``.

        Args:
            kind: ``counter`` or ``gauge``.
        """
        return {
            metric.name.removeprefix(_PREFIX): sum(s.value for s in metric.samples if not s.name.endswith("_created"))
            for metric in self.registry.collect()
            if metric.type == kind
        }

    # --- what the fleet tells -------------------------------------------------------------------------

    def set_instance_up(self, role: Role, address: str, up: bool) -> None:
        """An instance came or went."""
        self._instance_up.labels(role, address).set(up)

    def count_refused_instance(self, role: Role) -> None:
        """An instance was not admitted."""
        self._instances_refused.labels(role).inc()

    def set_prefix_mode(self, role: Role, address: str, mode: PrefixMode) -> None:
        """How well an instance's prefix cache is known has changed."""
        self._prefix_is_exact.labels(role, address).set(mode is PrefixMode.EXACT)

    def forget_instance(self, role: Role, address: str) -> None:
        """An instance has left for good."""
        for gauge in (self._instance_up, self._prefix_is_exact):
            with contextlib.suppress(KeyError):
                gauge.remove(role, address)

    def count_wire_error(self, role: Role) -> None:
        """A frame was not understood."""
        self._wire_errors.labels(role).inc()

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, text, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(_PREFIX + name, text, labels, registry=self.registry)
