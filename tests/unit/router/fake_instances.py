"""Instances without sockets: real legs, filled by a fixed rule, that fail when they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from pdserve.kv_layout import KVCacheSpec, ModelIdentity
from pdserve.protocol import (
    AddRequest,
    FinishReason,
    InstanceLimits,
    InstanceLoad,
    KVTransferParams,
    Ready,
    RequestOutput,
    Role,
    SamplingParams,
    TokenLogprobs,
    WireError,
)
from pdserve.router.config import HandoffSettings, PoolSettings
from pdserve.router.fleet import Fleet
from pdserve.router.flow import RequestFlow
from pdserve.router.health import HealthSettings, InstanceHealth
from pdserve.router.leg import InstanceLostError, Leg
from pdserve.router.legs import GenerationRequest
from pdserve.router.metrics import RouterMetrics
from pdserve.router.policies import build_policy
from pdserve.router.pool import Pool
from pdserve.router.record import ChoiceRecord, RecomputeWarning, RequestRecord
from pdserve.router.tracing.tracer import NullTracer

LIMITS = InstanceLimits(
    max_model_len=64, max_num_seqs=8, max_queue_len=8, num_blocks=100, vocab_size=49152, max_logprobs=20
)
OVERLOADED = WireError(code="rate_limit_exceeded", message="full", http_status=429, retryable=True)
DRAINING = WireError(code="service_unavailable", message="draining", http_status=503, retryable=True)
ENGINE_ERROR = WireError(code="engine_error", message="broken", http_status=500, retryable=True)
BAD_REQUEST = WireError(code="invalid_value", message="no such thing", http_status=400, param="top_p")


def run(main: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(60):
            return await main

    return asyncio.run(bounded())


def make_token(prompt: Sequence[int], seed: int, position: int) -> int:
    return 1000 + (sum(prompt) * 31 + seed * 17 + position * 101) % 900


def make_tokens(prompt: Sequence[int], seed: int, count: int) -> list[int]:
    return [make_token(prompt, seed, position) for position in range(count)]


def build_identity(weights: str = "w0", block_size: int = 1) -> ModelIdentity:
    kv = KVCacheSpec(num_layers=2, num_kv_heads=1, head_dim=8, block_size=block_size, dtype="bfloat16")
    return ModelIdentity(weights=weights, architecture="a0", compute_dtype="bfloat16", numerics="n0", kv=kv)


def build_ready(role: Role, generation: str = "g0", *, weights: str = "w0", session: str = "s") -> Ready:
    return Ready(
        session=session,
        instance_id=f"{role}-x",
        generation=generation,
        role=role,
        model="m",
        identity=build_identity(weights),
        limits=LIMITS,
        connector="fake",
        load=InstanceLoad(),
    )


@dataclass
class Fault:
    """How one leg goes wrong."""

    after_tokens: int | None = None
    """The instance is lost once so many new tokens were sent."""
    before_handoff: bool = False
    """The instance is lost between first token and HANDOFF."""
    error: WireError | None = None
    """The instance answers with this instead of any token."""
    error_after_tokens: int = 0
    not_connected: bool = False
    silent: bool = False
    """No answer ever."""
    stays: bool = False
    """The instance can be used again at once, as after a quick restart."""


@dataclass(eq=False)
class FakeInstance:
    """One instance; legs take one fault each from ``faults``, then go well."""

    role: Role
    address: str
    faults: list[Fault | None] = field(default_factory=list)
    cached_tokens: int = 0
    finds_kv: bool = True
    messages: list[AddRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    load: InstanceLoad = field(default_factory=InstanceLoad)
    num_unreported: int = 0
    ready: Ready | None = None
    refusal: str | None = None
    last_problem: str = ""
    is_leaving: bool = False
    health: InstanceHealth = field(default_factory=lambda: InstanceHealth(HealthSettings()))
    generation: int = 0

    def __post_init__(self) -> None:
        self.ready = build_ready(self.role)

    @property
    def name(self) -> str:
        return self.address

    @property
    def incarnation(self) -> str:
        return f"{self.address}/{self.generation}"

    @property
    def is_trusted(self) -> bool:
        return True

    @property
    def is_usable(self) -> bool:
        return self.ready is not None and not self.load.draining

    def start_leg(self, message: AddRequest) -> Leg:
        fault = (self.faults.pop(0) if self.faults else None) or Fault()
        if fault.not_connected:
            self.lose(fault)
            raise InstanceLostError("not connected")
        self.messages.append(message)
        leg = Leg(message.request_id, self.aborted.append)
        if not fault.silent:
            self._play(leg, fault, self._outputs(message, fault))
        return leg

    def release(self, request_id: str) -> None:
        self.released.append(request_id)

    def lose(self, fault: Fault) -> None:
        self.generation += 1
        if not fault.stays:
            self.ready = None

    def _play(self, leg: Leg, fault: Fault, outputs: list[RequestOutput]) -> None:
        """Each output in a turn of the event loop of its own."""

        def play_next() -> None:
            if outputs:
                leg.put(outputs.pop(0))
                asyncio.get_running_loop().call_soon(play_next)
            elif fault.after_tokens is not None or fault.before_handoff:
                self.lose(fault)
                leg.lose("lost")

        asyncio.get_running_loop().call_soon(play_next)

    def _outputs(self, message: AddRequest, fault: Fault) -> list[RequestOutput]:
        request_id, sampling = message.request_id, message.sampling
        if fault.error is not None and not fault.error_after_tokens:
            return [RequestOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=fault.error)]
        outputs: list[RequestOutput] = []
        position = len(message.output_token_ids)
        while True:
            token_id = make_token(message.prompt_token_ids, sampling.seed or 0, position)
            position += 1
            finish_reason = None
            if token_id in sampling.stop_token_ids:
                finish_reason = FinishReason.STOP
            elif position == sampling.max_tokens or len(message.prompt_token_ids) + position == LIMITS.max_model_len:
                finish_reason = FinishReason.LENGTH
            if fault.after_tokens == len(outputs):
                return outputs
            outputs.append(
                RequestOutput(
                    request_id=request_id,
                    new_token_ids=[token_id],
                    logprobs=[TokenLogprobs(token_id, -1.0, 1, [token_id], [-1.0])]
                    if sampling.logprobs is not None
                    else None,
                    num_cached_tokens=0 if outputs else self._count_cached(message),
                    finish_reason=finish_reason,
                    stop_token_id=token_id if finish_reason is FinishReason.STOP else None,
                )
            )
            if finish_reason is not None:
                return outputs
            if fault.error is not None and fault.error_after_tokens == len(outputs):
                return [
                    *outputs,
                    RequestOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=fault.error),
                ]
            if message.handoff:
                return outputs if fault.before_handoff else [*outputs, self._handoff(message)]

    def _count_cached(self, message: AddRequest) -> int:
        if message.kv_transfer_params is not None:
            return len(message.prompt_token_ids) if self.finds_kv else 0
        return self.cached_tokens

    def _handoff(self, message: AddRequest) -> RequestOutput:
        params = KVTransferParams(connector="fake", transfer_id=message.request_id)
        return RequestOutput(
            request_id=message.request_id, finish_reason=FinishReason.HANDOFF, kv_transfer_params=params
        )


@dataclass
class Bench:
    """A fleet of fake instances, and what is noted of one request."""

    fleet: Fleet
    metrics: RouterMetrics
    record: RequestRecord

    def build_flow(
        self,
        prompt: Sequence[int] = (5, 6, 7),
        *,
        settings: HandoffSettings | None = None,
        timeout_s: float = 10.0,
        **sampling: Any,
    ) -> RequestFlow:
        params = SamplingParams(**{"seed": 3, "max_tokens": 6, **sampling})
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        request = GenerationRequest("r", list(prompt), params, deadline_s)
        settings = settings or HandoffSettings(prefill_wait_s=0.0, failover_wait_s=0.05)
        return RequestFlow(request, self.fleet, settings, ChoiceRecord(self.record, 0))

    def get_metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"pdserve_router_{name}", labels) or 0.0


@asynccontextmanager
async def build_bench(prefill: Sequence[FakeInstance], decode: Sequence[FakeInstance]) -> AsyncIterator[Bench]:
    metrics = RouterMetrics()
    fleet = Fleet(PoolSettings(), router_id="router", model_name="m", metrics=metrics)
    fleet.prefill = Pool(Role.PREFILL, prefill, build_policy("round_robin"))  # type: ignore[arg-type]
    fleet.decode = Pool(Role.DECODE, decode, build_policy("round_robin"))  # type: ignore[arg-type]
    record = RequestRecord(
        "cmpl-1", "x-1", "completions", metrics=metrics, recompute_warning=RecomputeWarning(), tracer=NullTracer()
    )
    try:
        yield Bench(fleet, metrics, record)
    finally:
        await fleet.close()


async def collect(flow: RequestFlow, on_batch: Callable[[Any], None] | None = None) -> tuple[list[int], list[Any]]:
    """Every token of the flow, and its batches."""
    tokens: list[int] = []
    batches: list[Any] = []
    async for batch in flow.run():
        tokens += batch.token_ids
        batches.append(batch)
        if on_batch is not None:
            on_batch(batch)
    return tokens, batches
