"""The engine core: requests in, tokens out, one step at a time.

Composes scheduler, executor and connector. Knows nothing of sockets or text: `engine.server` puts it behind a
socket, `engine.llm` in front of a person. Not thread-safe: one thread owns it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping

from pdserve.connectors.base import KVConnectorScheduler
from pdserve.engine.announcement_wait import AnnouncementWait
from pdserve.engine.block_accounting import BlockReport, build_report
from pdserve.engine.cache_events import build_snapshot
from pdserve.engine.config import EngineConfig
from pdserve.engine.executor import Executor
from pdserve.engine.kv_cache_manager import KVCacheManager
from pdserve.engine.metrics import EngineStats
from pdserve.engine.request import Request
from pdserve.engine.sampling.grammar_masks import GrammarCompiler
from pdserve.engine.scheduler import Scheduler
from pdserve.engine.scheduler_output import SchedulerOutput
from pdserve.errors import EngineError
from pdserve.grammars import check_grammar
from pdserve.kv_layout import BlockHasher, ModelIdentity
from pdserve.protocol import (
    AddRequest,
    CacheEvents,
    GrammarSpec,
    InstanceLimits,
    InstanceLoad,
    RequestOutput,
    Role,
    WireError,
)
from pdserve.request_checks import check_request

logger = logging.getLogger(__name__)


class EngineCore:
    """One engine.

    Args:
        config: its settings, resolved.
        identity: the model's identity.
        limits: what it accepts.
        eos_token_ids: the model's end tokens.
        executor: runs the steps.
        connector: the connector's scheduler half.
        grammars: for requests with a grammar; None where no model stands behind the executor.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        identity: ModelIdentity,
        limits: InstanceLimits,
        eos_token_ids: frozenset[int],
        executor: Executor,
        connector: KVConnectorScheduler,
        grammars: GrammarCompiler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.identity = identity
        self.limits = limits
        self._grammars = grammars
        self._executor = executor
        self._connector = connector
        self._clock = clock
        self._num_arrived = 0
        self._closed = False
        self._stats = EngineStats(config.connector.connector)
        self.kv_cache = KVCacheManager(
            limits.num_blocks,
            config.cache.block_size,
            enable_prefix_caching=config.cache.enable_prefix_caching,
        )
        self._scheduler = Scheduler(
            config.scheduler,
            self.kv_cache,
            connector,
            eos_token_ids=eos_token_ids,
            stats=self._stats,
            clock=clock,
        )
        self._announcement_wait = AnnouncementWait(clock)

    @classmethod
    def build(
        cls,
        config: EngineConfig,
        *,
        role: Role,
        engine_id: str,
        on_progress: Callable[[str], None] | None = None,
        wake_up: Callable[[], None] | None = None,
    ) -> EngineCore:
        """Load the model, allocate KV memory and start the connector.

        Args:
            config: the settings as the user gave them.
            role: what the instance is used for; connectors save or load by it.
            engine_id: unique for each start of the process.
            on_progress: told in words what goes on.
            wake_up: called by connectors that can, on any thread, when ``step`` has something new to take in.

        Raises:
            ConfigError: a setting, a model file or the connector is wrong.
        """
        from pdserve.engine.build import build_engine

        return build_engine(cls, config, role=role, engine_id=engine_id, on_progress=on_progress, wake_up=wake_up)

    @property
    def model_name(self) -> str:
        """The name that the model is served under."""
        return self.config.model.served_model_name or self.config.model.model

    # --- requests ---------------------------------------------------------------------------------------

    def validate(self, request: AddRequest) -> None:
        """Check a request against the engine's limits.

        Raises:
            RequestError: what is wrong with it; ContextLengthError when it is too long.
        """
        check_request(request, self.limits)

    def compile_grammar(self, grammar: GrammarSpec) -> None:
        """Compile ahead, on any thread, what `add_request` would compile: it may take tens of milliseconds.

        Raises:
            RequestError: the grammar cannot be followed.
        """
        check_grammar(grammar)
        if self._grammars is not None:
            self._grammars.compile(grammar)

    def add_request(self, message: AddRequest) -> None:
        """Queue a request.

        Raises:
            RequestError: see `validate`.
            EngineError: its id is that of a request that lives, or whose KV still moves: a report could mean either.
            OverloadedError: the queue is full.
        """
        self.validate(message)
        if self._scheduler.has_request(message.request_id):
            raise EngineError(f"request id {message.request_id!r} is in use")
        if message.sampling.grammar is not None:
            self.compile_grammar(message.sampling.grammar)
        max_tokens = message.sampling.max_tokens
        max_total = self.limits.max_model_len
        if max_tokens is not None:
            max_total = min(max_total, len(message.prompt_token_ids) + max_tokens)
        request = Request(
            message,
            hasher=BlockHasher(self.identity.fingerprint, cache_salt=message.cache_salt),
            block_size=self.config.cache.block_size,
            max_total_tokens=max_total,
            arrival_order=self._num_arrived,
            now_s=self._clock(),
        )
        self._scheduler.add_request(request)
        self._num_arrived += 1

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End requests without output; unknown ids are ignored."""
        self._scheduler.abort_requests(request_ids)

    def fail_all_requests(self, message: str) -> list[RequestOutput]:
        """End every live request with an error that another instance may not have."""
        error = WireError(code="engine_error", message=message, retryable=True)
        return self._scheduler.fail_requests(self._scheduler.live_request_ids, error)

    # --- steps ------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether a step could compute tokens."""
        return self._scheduler.has_work and not self._is_waiting_to_announce

    def has_transfers(self) -> bool:
        """Whether ``step`` must be called every few milliseconds even when idle.

        Because KV moves or is held, or to hear that a worker is lost.
        """
        return self._scheduler.has_transfers or self._executor.is_lost

    def step(self) -> list[RequestOutput]:
        """Schedule, execute, update; outputs of all requests that got something."""
        outputs = self._scheduler.expire_requests()
        step = self._scheduler.schedule_nothing() if self._is_waiting_to_announce else self._scheduler.schedule()
        started_s = self._clock()
        result = self._executor.execute_model(step)
        outputs += self._refuse(result.refused)
        outputs += self._scheduler.update_from_output(step, result)
        self._observe_step(step, self._clock() - started_s)
        return outputs

    @property
    def _is_waiting_to_announce(self) -> bool:
        return not self._announcement_wait.is_over and self._scheduler.transfers.has_unannounced

    def _refuse(self, refused: Mapping[str, str]) -> list[RequestOutput]:
        """End requests that no other engine could go on with either: their own grammar is why."""
        outputs: list[RequestOutput] = []
        for request_id, reason in refused.items():
            error = WireError(code="invalid_value", message=reason, http_status=400, param="grammar")
            outputs += self._scheduler.fail_requests([request_id], error)
        return outputs

    def _observe_step(self, step: SchedulerOutput, seconds: float) -> None:
        if step.num_tokens:
            self._announcement_wait.note_step(seconds)
            self._stats.step_time.observe(seconds)
            self._stats.step_tokens.observe(step.num_tokens)

    # --- cache events -----------------------------------------------------------------------------------

    def listen_to_cache(self) -> CacheEvents:
        """Note cache events from now on; the whole prefix index as it stands."""
        pool = self.kv_cache.pool
        pool.events.is_listening = True
        return build_snapshot(pool.cached_digests)

    def ignore_cache(self) -> None:
        """Note no cache events any more."""
        self.kv_cache.pool.events.is_listening = False
        self.kv_cache.pool.events.forget()

    def take_cache_events(self) -> CacheEvents | None:
        """How the prefix index changed since the last call; None when it did not."""
        return self.kv_cache.pool.events.take(self.kv_cache.pool.cached_digests)

    # --- what others ask --------------------------------------------------------------------------------

    def get_load(self) -> InstanceLoad:
        """How busy the engine is."""
        return InstanceLoad(
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            num_used_blocks=self.kv_cache.pool.num_used_blocks,
            num_blocks=self.limits.num_blocks,
        )

    def get_stats(self) -> EngineStats:
        """Counters, with the gauges set to now."""
        load, stats = self.get_load(), self._stats
        stats.num_running.set(load.num_running)
        stats.num_waiting.set(load.num_waiting)
        stats.num_blocks.set(load.num_blocks)
        stats.num_used_blocks.set(load.num_used_blocks)
        stats.num_cached_blocks.set(self.kv_cache.pool.num_cached_blocks)
        self._scheduler.transfers.update_metrics()
        allocated = self.kv_cache.count_allocated_slots()
        wasted = max(allocated - self._scheduler.count_used_slots(), 0)
        stats.wasted_slots.set(wasted)
        stats.waste_ratio.set(wasted / allocated if allocated else 0.0)
        return stats

    def get_block_report(self) -> BlockReport:
        """Who holds which block, and what does not add up."""
        return build_report(self.kv_cache.pool, self._scheduler.get_holdings())

    def check_blocks(self, max_transfer_age_s: float) -> list[str]:
        """What a watchdog should tell: blocks nobody explains, transfers that do not end. Sets the metrics too."""
        mistakes = self.get_block_report().mistakes
        num_overdue = self._scheduler.transfers.count_overdue(max_transfer_age_s)
        self._stats.leaked_blocks.set(len(mistakes))
        self._stats.overdue_transfers.set(num_overdue)
        if num_overdue:
            mistakes.append(f"{num_overdue} KV transfers have been under way for more than {max_transfer_age_s:g} s")
        return mistakes

    def reset_prefix_cache(self) -> None:
        """Forget the contents of all blocks; running requests keep theirs."""
        self.kv_cache.pool.reset_index()

    def close(self) -> None:
        """Stop workers and connector; idempotent."""
        if not self._closed:
            self._closed = True
            self._executor.close()
            self._connector.close()
