"""One client request as operators see it: its timeline, its share of the metrics, its line in the log."""

from __future__ import annotations

import logging
import time

from pdserve.protocol import KVTransferParams, Role, TimelineEvent
from pdserve.router.instance import Instance
from pdserve.router.metrics import RouterMetrics
from pdserve.router.timeline import RequestTimeline
from pdserve.router.tracing.tracer import RequestTracer

logger = logging.getLogger(__name__)

CLIENT_DISCONNECTED = "client_disconnected"
_WARNING_INTERVAL_S = 60.0


class RecomputeWarning:
    """Says, once a minute at most, that hand-offs move no KV. One for each router."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def warn(self, instance_name: str, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Log the line unless it was logged a short while ago."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _WARNING_INTERVAL_S
            logger.warning(
                "decode instance %s found %d of %d prompt tokens after a hand-off and computed the others again: "
                "do both pools use the same connector and the same store?",
                instance_name, num_cached_tokens, num_prompt_tokens,
            )  # fmt: skip


class RequestRecord:
    """What is noted of one client request from its arrival to its end. Lives on the event loop.

    Args:
        response_id: the id in the answer.
        request_id: the X-Request-Id of the answer.
        endpoint: ``completions`` or ``chat``.
        metrics: counts.
        recompute_warning: the router's.
        tracer: hears of the end.
        traceparent: the client's header of this name.
    """

    def __init__(
        self,
        response_id: str,
        request_id: str,
        endpoint: str,
        *,
        metrics: RouterMetrics,
        recompute_warning: RecomputeWarning,
        tracer: RequestTracer,
        traceparent: str = "",
    ) -> None:
        self._tracer = tracer
        self._traceparent = traceparent
        self.timeline = RequestTimeline(response_id, request_id)
        self.timeline.add("arrived")
        self.metrics = metrics
        self.recompute_warning = recompute_warning
        self.num_output_tokens = 0
        self._endpoint = endpoint
        self._started_s = time.perf_counter()
        self._first_token_s: float | None = None
        self._num_prompt_tokens = 0
        self._ended = False

    def note_tokenized(self, num_prompt_tokens: int) -> None:
        """The prompts are tokenised and checked."""
        self._num_prompt_tokens = num_prompt_tokens
        self.timeline.add("tokenized", num_tokens=num_prompt_tokens)
        self.metrics.prompt_tokens.inc(num_prompt_tokens)

    def note_first_token(self) -> None:
        """Some choice has its first token; only the first of all counts."""
        if self._first_token_s is None:
            self._first_token_s = time.perf_counter()
            self.metrics.time_to_first_token.observe(self._first_token_s - self._started_s)

    def end(self, outcome: str) -> None:
        """The request is over; the first call counts.

        Args:
            outcome: ``stop``, ``length``, ``client_disconnected``, or an error's code.
        """
        if self._ended:
            return
        self._ended = True
        total_s = time.perf_counter() - self._started_s
        self.timeline.add("finished", num_tokens=self.num_output_tokens)
        self.metrics.requests.labels(self._endpoint, outcome).inc()
        self.metrics.request_latency.observe(total_s)
        if outcome == CLIENT_DISCONNECTED:
            self.metrics.client_disconnects.inc()
        ttft_ms = None if self._first_token_s is None else round(1000 * (self._first_token_s - self._started_s), 1)
        self.timeline.summary = {
            "status": "finished",
            "outcome": outcome,
            "endpoint": self._endpoint,
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "ttft_ms": ttft_ms,
            "total_ms": round(1000 * total_s, 1),
        }
        self._log(outcome, ttft_ms, total_s)
        self._tracer.emit(self.timeline, self._traceparent)

    def _log(self, outcome: str, ttft_ms: float | None, total_s: float) -> None:
        instances = dict.fromkeys(leg["instance_id"] for leg in self.timeline.instances)
        logger.info(
            "request ended",
            extra={
                "kv": {
                    "id": self.timeline.response_id,
                    "request_id": self.timeline.request_id,
                    "outcome": outcome,
                    "prompt_tokens": self._num_prompt_tokens,
                    "output_tokens": self.num_output_tokens,
                    "ttft_ms": ttft_ms,
                    "total_ms": round(1000 * total_s, 1),
                    "instances": ",".join(instances) or "-",
                }
            },
        )


class ChoiceRecord:
    """The part of one choice; hears of its flow (`pdserve.router.flow.FlowObserver`).

    Args:
        request: the record of the client's request.
        choice: index of the choice.
    """

    def __init__(self, request: RequestRecord, choice: int) -> None:
        self._request = request
        self._choice = choice
        self._last_tokens_s: float | None = None
        self._decode_name = ""

    def note_tokens(self, num_tokens: int) -> None:
        """Tokens came."""
        now_s = time.monotonic()
        if self._last_tokens_s is None:
            self._request.note_first_token()
        else:
            self._request.metrics.tokens.note_gap(now_s - self._last_tokens_s)
        self._last_tokens_s = now_s
        self._request.num_output_tokens += num_tokens
        self._request.metrics.tokens.note_tokens(num_tokens)

    def leg_started(self, role: Role, instance: Instance) -> None:
        """A leg was sent."""
        self._request.timeline.add_leg(self._choice, role, instance.name, instance.address)
        if role is Role.DECODE:
            self._decode_name = instance.name

    def leg_events(self, role: Role, instance: Instance, events: list[TimelineEvent]) -> None:
        """What the instance tells of the request."""
        self._request.timeline.add_events(self._choice, instance.name, events)

    def handed_off(self, params: KVTransferParams | None) -> None:
        """The prefill leg is done."""
        self._request.metrics.handoffs.inc()

    def handoff_arrived(self, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """The decode instance made its first token after a hand-off."""
        if 2 * num_cached_tokens <= num_prompt_tokens:
            self._request.metrics.decode_recomputed_prompts.inc()
            self._request.recompute_warning.warn(self._decode_name, num_prompt_tokens, num_cached_tokens)

    def retried(self, reason: str) -> None:
        """A leg failed and the request goes on."""
        self._request.metrics.retries.labels(reason).inc()
        self._request.timeline.add("retried", choice=self._choice)

    def fell_back(self) -> None:
        """The prefill pool is gone: decode does all of it."""
        self._request.metrics.colocated_fallbacks.inc()
