"""What an engine counts, as Prometheus metrics of its own registry.

Names follow the field's habit: unit suffixes, ``_total`` for counters, one prefix. Token counts of prompts and
answers, seconds, blocks; never any text.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from pdserve.connectors.base import MatchResult
from pdserve.engine.batch_histogram import BatchHistogram
from pdserve.engine.request import Request
from pdserve.engine.transfer_metrics import TransferMetrics
from pdserve.protocol import FinishReason

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class EngineStats:
    """An engine's counters. Written by the engine's main thread, rendered by the HTTP thread.

    Args:
        connector: the name of its connector.
    """

    def __init__(self, connector: str = "null") -> None:
        self.registry = CollectorRegistry()
        self._make_request_metrics()
        self._make_cache_metrics()
        self.transfers = TransferMetrics(self.registry, connector)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"pdserve_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return Gauge(f"pdserve_{name}", text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS, labels: tuple[str, ...] = ()
    ) -> Histogram:
        return Histogram(f"pdserve_{name}", text, labels, buckets=buckets, registry=self.registry)

    def _make_request_metrics(self) -> None:
        self.info = self._gauge("instance_info", "Constant 1", ("role", "instance_id"))
        self.requests = self._counter("requests_total", "Requests that ended, by reason", ("reason",))
        self.num_running = self._gauge("num_requests_running", "Requests that compute")
        self.num_waiting = self._gauge("num_requests_waiting", "Requests that wait for a place or for KV")
        self.prompt_tokens = self._counter("prompt_tokens_total", "Prompt tokens of ended requests")
        self.generation_tokens = self._counter("generation_tokens_total", "Tokens sampled")
        self.preemptions = self._counter("preemptions_total", "Times a running request's blocks were taken")
        self.queue_time = self._histogram("queue_time_seconds", "Receipt to first scheduled step")
        self.ttft = self._histogram("time_to_first_token_seconds", "Receipt to first token of this instance")
        self.itl = BatchHistogram(
            "pdserve_inter_token_latency_seconds", "Between two tokens of a request", _SECONDS, self.registry
        )
        self.e2e = self._histogram("request_latency_seconds", "Receipt to end at this instance")
        self.step_time = self._histogram("step_seconds", "One engine step that computed tokens")
        self.step_tokens = self._histogram("step_tokens", "Tokens computed in one step", _STEP_TOKENS)

    def _make_cache_metrics(self) -> None:
        self.num_blocks = self._gauge("kv_blocks", "KV blocks in the pool")
        self.num_used_blocks = self._gauge("kv_blocks_used", "KV blocks that a request or a transfer holds")
        self.num_cached_blocks = self._gauge("kv_blocks_cached", "KV blocks the prefix index knows")
        self.leaked_blocks = self._gauge("kv_blocks_unexplained", "Blocks whose holders do not add up (watchdog)")
        self.overdue_transfers = self._gauge("kv_transfers_overdue", "KV transfers that do not end (watchdog)")
        self.wasted_slots = self._gauge("kv_wasted_slots", "Allocated token slots that hold no KV")
        self.waste_ratio = self._gauge("kv_waste_ratio", "Wasted slots over allocated slots")
        self.prefix_queries = self._counter(
            "prefix_cache_queries_total", "Prompt tokens in blocks that a prefix hit could have covered"
        )
        self.prefix_hits = self._counter("prefix_cache_hits_total", "Prompt tokens covered by prefix hits")
        self.external_queries = self._counter("external_cache_queries_total", "Prompt tokens asked of the connector")
        self.external_hits = self._counter("external_cache_hits_total", "Prompt tokens the connector had")

    def count_lookup(self, request: Request, num_local: int, match: MatchResult, block_size: int) -> None:
        """One admission's prefix lookups. Asked: what could be hit, so that a full hit is a rate of 1."""
        num_hittable = (min(request.num_tokens - 1, request.num_prompt_tokens) // block_size) * block_size
        self.prefix_queries.inc(num_hittable)
        self.prefix_hits.inc(min(num_local, num_hittable))
        num_asked = max(min(request.num_tokens - 1, request.num_prompt_tokens) - num_local, 0)
        self.external_queries.inc(num_asked)
        num_external = match.num_tokens or 0
        self.external_hits.inc(num_external)
        self.transfers.count_lookup(-(-num_asked // block_size), -(-num_external // block_size), match.part)

    def observe_tokens(self, requests: Sequence[Request], now_s: float) -> None:
        """A step sampled a token for each of these requests."""
        gaps_s = []
        for request in requests:
            if request.last_token_s is None:
                self.ttft.observe(now_s - request.received_s)
            else:
                gaps_s.append(now_s - request.last_token_s)
            request.last_token_s = now_s
        self.itl.observe(gaps_s)
        self.generation_tokens.inc(len(requests))

    def count_finished(self, request: Request, reason: FinishReason, now_s: float) -> None:
        """A request ended."""
        self.requests.labels(reason.value).inc()
        self.prompt_tokens.inc(request.num_prompt_tokens)
        self.e2e.observe(now_s - request.received_s)


def render_metrics(stats: EngineStats, role: str, instance_id: str) -> bytes:
    """The exposition format, for ``GET /metrics``."""
    stats.info.labels(role, instance_id).set(1)
    return generate_latest(stats.registry)
