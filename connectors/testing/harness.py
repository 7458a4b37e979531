"""Plays the engine around one connector: scheduler, model runner, block pool and clock of steps.

It is stricter than an engine: blocks are poisoned when they are freed and watched from then on, loaded blocks are
compared byte for byte with what the model would compute, and every report is checked against what is owed. A breach
raises `RuleViolationError` with the rule's number.

A request's way::

    submit ─> lookup ─> admit ──(load under way)──> step … ─> finish ─> step until nothing is owed
                          └──(nothing to load)───────┘
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from pdserve.connectors.base import (
    ChoosesLayerSteps,
    ConnectorContext,
    ConnectorMetadata,
    ConnectorOutput,
    ConnectorStats,
    FinishDecision,
    HearsOfQueue,
    KVConnector,
    KVConnectorWorker,
    KVRequest,
    MatchResult,
    ScheduledTokens,
    StepPlan,
    WakesEngine,
)
from pdserve.connectors.messages import MessageTypes
from pdserve.connectors.testing.counters import require_plausible
from pdserve.connectors.testing.kv_content import Bytes, KVContent
from pdserve.connectors.testing.kv_share import KVShare
from pdserve.connectors.testing.live_request import LiveRequest
from pdserve.connectors.testing.pool import BlockMemory
from pdserve.connectors.testing.rank_workers import RankWorkers, build_worker_halves
from pdserve.connectors.testing.violations import Blame, RuleViolationError
from pdserve.connectors.testing.wire import Wire
from pdserve.kv_layout import BlockHasher
from pdserve.protocol import KVTransferParams

_IDLE_STEP_S = 0.0002


WorkerWrapper = Callable[[KVConnectorWorker], KVConnectorWorker]


class EngineHarness:
    """One engine with one connector.

    Args:
        connector: the class under test.
        context: what its halves are built with, if there is one rank; else the first rank's.
        num_blocks: size of the pool.
        wrap_worker: puts something between the engine and the worker half, or all of them.
        message_types: what the halves say to each other goes as bytes of these types; None = as it is.

    Attributes:
        blame: what wrong bytes count as at the moment.
        woken: set when the connector wakes the engine; a test clears it.
    """

    def __init__(
        self,
        connector: type[KVConnector],
        context: ConnectorContext,
        *,
        num_blocks: int = 64,
        wrap_worker: WorkerWrapper | None = None,
        message_types: MessageTypes | None = None,
    ) -> None:
        self.context = context
        self.blame: Blame | None = None
        contexts = [dataclasses.replace(context, rank=rank) for rank in context.rank.all_ranks]
        contents = [KVContent(own.identity.fingerprint + own.rank.label, own.spec) for own in contexts]
        self.content = contents[0]
        self.memory = BlockMemory(
            [KVShare(content, context.spec, num_blocks, context.role) for content in contents], num_blocks
        )
        self._wire = Wire(message_types)
        with contextlib.ExitStack() as built:
            self.scheduler = connector.build_scheduler(context)
            built.callback(lambda: self.scheduler.close())
            halves = build_worker_halves(connector, contexts)
            self.ranks = RankWorkers(halves, self.memory.shares, self._wire)
            worker = halves[0] if len(halves) == 1 else self.ranks
            self.worker = wrap_worker(worker) if wrap_worker else worker
            built.callback(lambda: self.worker.close())
            self.worker.register_kv_caches(self.memory.kv_cache, context.spec)
            self.woken = threading.Event()
            for half in (self.scheduler, worker):
                if isinstance(half, WakesEngine):
                    half.set_wake_up(self.woken.set)
            self._open = built.pop_all()
        self.stats = ConnectorStats()
        self.sent: dict[str, bool] = {}
        """Requests reported sent, and whether they were saved whole."""
        self.received: dict[str, int] = {}
        """Requests whose load ended, and how many tokens of it are good."""
        self._layerwise = connector.features.layerwise
        self._holds_blocks = connector.features.can_save and not connector.features.is_store
        self._live: dict[str, LiveRequest] = {}
        self._owed_sent: set[str] = set()
        self._due: list[str] = []
        self._loads_started: list[str] = []

    # --- what a test does -----------------------------------------------------------------------------------

    def submit(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        salt: str = "",
        adapter: str = "",
        params: KVTransferParams | None = None,
    ) -> KVRequest:
        """A request arrives, and waits for its turn."""
        hasher = BlockHasher(self.context.identity.fingerprint, cache_salt=salt, adapter=adapter)
        keys = hasher.block_keys(token_ids, self.context.spec.block_size)
        request = KVRequest(request_id, len(token_ids), tuple(keys), params)
        self._live[request_id] = LiveRequest(request, tuple(token_ids), salt + adapter)
        if params is not None and isinstance(self.scheduler, HearsOfQueue):
            self.scheduler.request_queued(request)
        return request

    def lookup(self, request_id: str, num_local_tokens: int = 0) -> MatchResult:
        """Ask the connector; twice, as after a failed allocation, for asking must have no consequences.

        While it asks for patience, the engine goes on.
        """
        live = self._live[request_id]
        request = live.request
        ask = functools.partial(self.scheduler.get_num_new_matched_tokens, request, num_local_tokens)
        self.step_until(lambda: ask().num_tokens is not None)
        match = ask()
        if num_local_tokens + (match.num_tokens or 0) > max(request.num_prompt_tokens, num_local_tokens):
            excess = num_local_tokens + (match.num_tokens or 0) - request.num_prompt_tokens
            rule = "R1" if num_local_tokens and excess >= self.context.spec.block_size else "R5"
            raise RuleViolationError(rule, f"{match} beyond {num_local_tokens} claims more than the prompt")
        if match.is_async and not match.num_tokens:
            raise RuleViolationError("R3", f"{match} promises a load of nothing")
        live.is_load_async = match.is_async
        return match

    def admit(self, request_id: str, num_external_tokens: int, num_local_tokens: int = 0) -> list[int]:
        """Allocate the request's blocks and tell the connector; local tokens are in place already."""
        live = self._live[request_id]
        live.block_ids = self.memory.allocate(self.context.spec.num_blocks_for(len(live.token_ids)))
        live.num_local_tokens = live.num_computed_tokens = num_local_tokens
        self.memory.fill(live.block_ids, live.token_ids, range(num_local_tokens), live.salt)
        live.num_loading_tokens = num_external_tokens
        if num_external_tokens and live.is_load_async:
            self._loads_started.append(request_id)
        self.scheduler.update_state_after_alloc(live.request, live.block_ids, num_local_tokens, num_external_tokens)
        return live.block_ids

    def step(
        self,
        scheduled: Mapping[str, int] | None = None,
        preempted: Sequence[str] = (),
        *,
        forward_fails: bool = False,
    ) -> ConnectorOutput:
        """One engine step: ``scheduled`` tokens of each request are computed, unless the forward pass fails.

        With layer hooks it fails in the last layer, without them before the first.
        """
        chosen = [(self._live[request_id], num_tokens) for request_id, num_tokens in (scheduled or {}).items()]
        for request_id in preempted:
            self._release(self._live[request_id], "R8")
        metadata = self.build_metadata(scheduled or {}, preempted)
        started, self._loads_started = self._loads_started, []
        self.ranks.expect(started, self._due)
        self.worker.start_load_kv(self._wire.carry_metadata(metadata))
        self._run_layers(chosen, forward_fails=forward_fails)
        if not forward_fails:
            self.worker.wait_for_save()
        due, self._due = self._due, []
        output = self._wire.carry_output(self.worker.get_finished(due))
        self.scheduler.update_from_output(output)
        if not forward_fails:
            for live, num_tokens in chosen:
                live.num_computed_tokens += num_tokens
        self._take_report(output)
        self.memory.check_free_blocks()
        return output

    def build_metadata(self, scheduled: Mapping[str, int], preempted: Sequence[str] = ()) -> ConnectorMetadata:
        """The scheduler half's message for a step."""
        items = []
        for request_id, num_tokens in scheduled.items():
            live = self._live[request_id]
            items.append(ScheduledTokens(live.request, tuple(live.block_ids), live.num_computed_tokens, num_tokens))
        return self.scheduler.build_connector_metadata(StepPlan(items, tuple(preempted)))

    def finish(self, request_id: str, *, handoff: bool = False) -> FinishDecision:
        """The request ends now, wherever it stands; an abort unless it is handed over."""
        live = self._live[request_id]
        self._check_intact(live)
        decision = self.scheduler.request_finished(
            live.request, live.block_ids, live.num_computed_tokens, handoff=handoff
        )
        if decision.hold_blocks and not handoff:
            raise RuleViolationError("R9", f"blocks of {request_id} are held, but nobody comes for them")
        live.is_finished = True
        live.is_held = decision.hold_blocks
        if decision.expects_sent:
            self._owed_sent.add(request_id)
            self._due.append(request_id)
        self._release_if_free(live)
        return decision

    def generate(self, request_id: str, token_ids: Sequence[int], *, num_before: int = 0) -> None:
        """Answer tokens, sampled or drafted, follow the prompt and are computed in one step.

        Args:
            request_id: whose.
            token_ids: the answer's.
            num_before: tokens at the prompt's end that the same step computes.
        """
        live = self._live[request_id]
        live.token_ids = (*live.token_ids, *token_ids)
        num_missing = self.context.spec.num_blocks_for(len(live.token_ids)) - len(live.block_ids)
        live.block_ids += self.memory.allocate(num_missing)
        self.step({request_id: num_before + len(token_ids)})

    def step_until(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Idle steps until ``condition`` holds.

        There is a moment between two steps: a loop that never lets go of the interpreter would starve the
        connector's threads.

        Raises:
            TimeoutError: it never did.
        """
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError("the connector did not get there in time")
            self.step()
            time.sleep(_IDLE_STEP_S)

    def close(self) -> None:
        """Close both halves, whatever one of them does."""
        self._open.close()

    # --- whole legs ------------------------------------------------------------------------------------------

    def prefill(
        self, request_id: str, token_ids: Sequence[int], *, chunk: int | None = None, salt: str = "", adapter: str = ""
    ) -> FinishDecision:
        """Compute a whole prompt without asking the connector, in chunks, and hand it over."""
        self.submit(request_id, token_ids, salt=salt, adapter=adapter)
        self.admit(request_id, 0)
        done = 0
        while done < len(token_ids):
            num_tokens = min(chunk or len(token_ids), len(token_ids) - done)
            self.step({request_id: num_tokens})
            done += num_tokens
        return self.finish(request_id, handoff=True)

    def send(self, request_id: str, token_ids: Sequence[int], *, chunk: int | None = None, salt: str = "") -> bool:
        """`prefill`, and wait until it is sent; whether it was saved whole."""
        self.prefill(request_id, token_ids, chunk=chunk, salt=salt)
        self.step_until(lambda: request_id in self.sent)
        return self.sent[request_id]

    def load(self, request_id: str, token_ids: Sequence[int], *, num_local_tokens: int = 0, salt: str = "") -> int:
        """Look up and load what there is; the number of tokens that arrived. The request stays."""
        self.submit(request_id, token_ids, salt=salt)
        match = self.lookup(request_id, num_local_tokens)
        self.admit(request_id, match.num_tokens or 0, num_local_tokens)
        if not match.num_tokens:
            return 0
        self.step_until(lambda: request_id in self.received)
        return self.received[request_id]

    # --- what a test looks at ---------------------------------------------------------------------------------

    @property
    def num_used_blocks(self) -> int:
        """Blocks that somebody owns."""
        return self.memory.num_used_blocks

    @property
    def is_idle(self) -> bool:
        """Whether the connector owes no report."""
        return not self._owed_sent and not self.loading_request_ids

    @property
    def owed_sends(self) -> frozenset[str]:
        """Requests whose sending is still to be reported."""
        return frozenset(self._owed_sent)

    @property
    def held_request_ids(self) -> frozenset[str]:
        """Ended requests whose blocks the connector holds for a consumer."""
        return frozenset(request_id for request_id, live in self._live.items() if live.is_held)

    @property
    def loading_request_ids(self) -> list[str]:
        """Requests whose load is still to be reported."""
        return [request_id for request_id, live in self._live.items() if live.num_loading_tokens]

    @property
    def live_request_ids(self) -> list[str]:
        """Requests that have not ended."""
        return [request_id for request_id, live in self._live.items() if not live.is_finished]

    def get_block_ids(self, request_id: str) -> list[int]:
        """The block table of a request that has not ended."""
        return self._live[request_id].block_ids

    def read_block(self, block_id: int) -> Bytes:
        """A block's bytes, ``[L·2·K, S, H bytes]``."""
        return self.memory.read_block(block_id)

    # --- the engine's part --------------------------------------------------------------------------------------

    def _run_layers(self, chosen: Sequence[tuple[LiveRequest, int]], *, forward_fails: bool) -> None:
        """The forward pass; with layer hooks, a layer's KV stands in memory only when its turn has come."""
        if not self._wants_layers():
            if not forward_fails:
                self._fill(chosen, None)
            return
        for layer in range(self.context.spec.num_layers - forward_fails):
            self.worker.wait_for_layer_load(layer)
            self._fill(chosen, layer)
            self.worker.save_kv_layer(layer)

    def _wants_layers(self) -> bool:
        if isinstance(self.worker, ChoosesLayerSteps):
            return self._layerwise and self.worker.wants_layers()
        return self._layerwise

    def _fill(self, chosen: Sequence[tuple[LiveRequest, int]], layer: int | None) -> None:
        for live, num_tokens in chosen:
            end = min(live.num_computed_tokens + num_tokens, len(live.token_ids))
            positions = range(live.num_computed_tokens, end)
            self.memory.fill(live.block_ids, live.token_ids, positions, live.salt, layer)

    def _take_report(self, output: ConnectorOutput) -> None:
        require_plausible(output)
        self.stats.add(output.stats)
        for request_id in output.finished_sending | output.failed_sending:
            self._take_sent(request_id, whole=request_id not in output.failed_sending)
        for request_id in output.finished_receiving:
            self._take_received(request_id, None)
        for request_id, num_good_tokens in output.failed_receiving.items():
            self._take_received(request_id, num_good_tokens)
        for request_id in self.loading_request_ids:
            if not self._live[request_id].is_load_async:
                self._end_synchronous_load(request_id, output.invalid_block_ids)

    def _end_synchronous_load(self, request_id: str, invalid_block_ids: set[int]) -> None:
        """A synchronous load is done in the step after its admission; it ends before the first invalid block."""
        live = self._live[request_id]
        size = self.context.spec.block_size
        bad = [index for index, block_id in enumerate(live.block_ids) if block_id in invalid_block_ids]
        num_good = max(bad[0] * size - live.num_local_tokens, 0) if bad else live.num_loading_tokens
        self._take_received(request_id, num_good if num_good < live.num_loading_tokens else None)

    def _take_sent(self, request_id: str, *, whole: bool) -> None:
        if request_id not in self._owed_sent:
            raise RuleViolationError("R10", f"{request_id} was reported sent, which nobody waits for")
        self._owed_sent.discard(request_id)
        self.sent[request_id] = whole
        live = self._live[request_id]
        live.is_held = False
        self._release_if_free(live)

    def _take_received(self, request_id: str, num_good_tokens: int | None) -> None:
        live = self._live.get(request_id)
        if live is None or not live.num_loading_tokens:
            raise RuleViolationError("R9", f"the load of {request_id} was reported, which nobody waits for")
        good = live.num_loading_tokens if num_good_tokens is None else num_good_tokens
        if num_good_tokens is not None and not 0 <= good < live.num_loading_tokens:
            raise RuleViolationError(
                "R4", f"{request_id} failed with {good} good tokens of {live.num_loading_tokens}: that is no failure"
            )
        live.num_loading_tokens = 0
        live.num_computed_tokens += good
        live.has_failed_load = num_good_tokens is not None
        self.received[request_id] = good
        self._check_loaded(live)
        self._release_if_free(live)

    def _check_loaded(self, live: LiveRequest) -> None:
        name = live.request.request_id
        local = range(live.num_local_tokens)
        if self.memory.find_wrong(live.block_ids, live.token_ids, local, live.salt) is not None:
            raise RuleViolationError("R1", f"the load of {name} wrote over tokens that were there already")
        loaded = range(live.num_local_tokens, live.num_computed_tokens)
        position = self.memory.find_wrong(live.block_ids, live.token_ids, loaded, live.salt)
        if position is not None:
            rule, reason = self.memory.explain_wrong(
                live.block_ids, live.token_ids, position, live.salt, holds_blocks=self._holds_blocks
            )
            message = f"token {position} of {name} was loaded, but {reason}"
            raise RuleViolationError(self._choose_rule(rule) or "R14", message)

    def _check_intact(self, live: LiveRequest) -> None:
        """What stands in the request's blocks is still right: nobody wrote there since."""
        computed = range(min(live.num_computed_tokens, len(live.token_ids)))
        if live.num_loading_tokens or not live.block_ids:
            return
        position = self.memory.find_wrong(live.block_ids, live.token_ids, computed, live.salt)
        if position is not None:
            rule = "R11" if live.has_failed_load else "R9"
            message = f"token {position} of {live.request.request_id} was written over by somebody"
            raise RuleViolationError(self.blame.rule if self.blame else rule, message)

    def _choose_rule(self, rule: str | None) -> str | None:
        """The rule to blame for wrong bytes whose origin speaks for ``rule``, if it speaks at all."""
        if self.blame is None or (rule is not None and not self.blame.covers_garbage):
            return rule
        return self.blame.rule

    def _release_if_free(self, live: LiveRequest) -> None:
        if live.is_finished and not live.is_held and not live.num_loading_tokens:
            self._release(live, "R11" if live.has_failed_load else "R9")
            if live.request.request_id not in self._owed_sent:
                del self._live[live.request.request_id]

    def _release(self, live: LiveRequest, rule: str) -> None:
        """Free the blocks, and write over them: a connector that still reads them saves garbage."""
        self.memory.free(live.block_ids, rule)
        live.block_ids = []
        live.num_computed_tokens = 0
