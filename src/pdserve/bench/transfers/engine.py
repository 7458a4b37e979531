"""An engine without a model: its steps drive a connector's two halves; computing takes no time, or that of a stand-in.

What a connector must hear, and when, is its contract with the engine (`pdserve.connectors.base`); here are the
shortest ways through it, for one prompt at a time.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.bench.transfers.forward import PacedForward
from pdserve.bench.transfers.pool import BlockRing
from pdserve.connectors.base import (
    ChoosesLayerSteps,
    ConnectorContext,
    ConnectorOutput,
    ConnectorStats,
    KVConnector,
    KVRequest,
    MatchResult,
    ScheduledTokens,
    StepPlan,
    WakesEngine,
)
from pdserve.engine.server.inbox import Inbox
from pdserve.engine.transfer_poll import get_transfer_poll_s
from pdserve.kv_layout import BlockHasher
from pdserve.protocol import KVTransferParams

_TIMEOUT_S = 60.0


class HandOffError(Exception):
    """KV did not get through; the message says how far it came."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """How a prompt is computed.

    Attributes:
        num_tokens: most of one step.
        tokens_per_s: how fast; at the default, in no time.
    """

    num_tokens: int
    tokens_per_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Offered:
    """A prompt that is computed, and whose KV can be fetched.

    Attributes:
        params: for whoever fetches it.
        blocks: where it lies in the producer's ring.
        computed_s: when its last token was computed, by the machine's monotonic clock.
        fetchable_s: when its KV could be fetched.
    """

    params: KVTransferParams | None
    blocks: slice
    computed_s: float
    fetchable_s: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """A prompt whose KV has arrived.

    Attributes:
        blocks: where it lies in the consumer's ring.
        seconds: from the first look for it to the report that all of it is there.
    """

    blocks: slice
    seconds: float


class BareEngine:
    """One engine with one connector; nothing of it lives on another thread than its caller's.

    Args:
        connector: the class.
        context: what its halves are built with.
        ring: the pool.
    """

    def __init__(self, connector: type[KVConnector], context: ConnectorContext, ring: BlockRing) -> None:
        self.stats = ConnectorStats()
        self._context = context
        self._ring = ring
        self._num_layers = context.spec.num_layers if connector.features.layerwise else 0
        self._scheduler = connector.build_scheduler(context)
        self._worker = connector.build_worker(context)
        self._worker.register_kv_caches(ring.kv_cache, context.spec)
        self._inbox = Inbox()
        for half in (self._scheduler, self._worker):
            if isinstance(half, WakesEngine):
                half.set_wake_up(self._inbox.wake)
        self._forward = PacedForward()
        self._hasher = BlockHasher(context.identity.fingerprint)
        self._serials = itertools.count()
        self._owed: set[str] = set()
        self._due: list[str] = []

    @property
    def has_sends(self) -> bool:
        """Whether the connector still holds blocks, or writes."""
        return bool(self._owed)

    def offer(self, token_ids: Sequence[int], chunks: Chunks) -> Offered:
        """Compute a prompt and hand it over.

        Args:
            token_ids: the prompt.
            chunks: how it is computed.

        Raises:
            HandOffError: its KV cannot be fetched.
        """
        request = self._build_request(token_ids, None)
        blocks = self._ring.take(len(request.block_keys))
        block_ids = range(blocks.start, blocks.stop)
        self._ring.clear_behind(blocks, len(token_ids))
        self._scheduler.update_state_after_alloc(request, block_ids, 0, 0)
        for start in range(0, len(token_ids), chunks.num_tokens):
            num_tokens = min(chunks.num_tokens, len(token_ids) - start)
            plan = StepPlan([ScheduledTokens(request, block_ids, start, num_tokens)])
            self._worker.start_load_kv(self._scheduler.build_connector_metadata(plan))
            computed_s = self._run_layers(num_tokens / chunks.tokens_per_s)
            self._end_step()
        decision = self._scheduler.request_finished(request, block_ids, len(token_ids), handoff=True)
        if decision.expects_sent:
            self._owed.add(request.request_id)
            self._due.append(request.request_id)
        if decision.announce_when_sent and not decision.hold_blocks:
            self._step_until(lambda: request.request_id not in self._owed, "saving")
        return Offered(decision.kv_transfer_params, blocks, computed_s, time.monotonic())

    def load(self, token_ids: Sequence[int], params: KVTransferParams | None) -> Loaded:
        """Fetch a prompt's KV.

        Raises:
            HandOffError: not all of it arrived.
        """
        request = self._build_request(token_ids, params)
        began_s = time.monotonic()
        match = self._look_up(request)
        if match.num_tokens != len(token_ids):
            raise HandOffError(f"the lookup promises {match.num_tokens} of {len(token_ids)} tokens")
        blocks = self._ring.take(len(request.block_keys))
        block_ids = range(blocks.start, blocks.stop)
        self._scheduler.update_state_after_alloc(request, block_ids, 0, len(token_ids))
        if match.is_async:
            self._wait_for_load(request.request_id, len(token_ids))
        elif self.step().invalid_block_ids:
            raise HandOffError("a synchronous load left blocks unfilled")
        seconds = time.monotonic() - began_s
        self._scheduler.request_finished(request, block_ids, len(token_ids), handoff=False)
        self.step()
        return Loaded(blocks, seconds)

    def step(self) -> ConnectorOutput:
        """A step with no tokens."""
        self._worker.start_load_kv(self._scheduler.build_connector_metadata(StepPlan([])))
        self._run_layers(0.0)
        return self._end_step()

    def close(self) -> None:
        """Close both halves."""
        self._worker.close()
        self._scheduler.close()

    def _run_layers(self, seconds: float) -> float:
        """A forward pass, layer by layer where the connector wants that; when the last layer's KV stood."""
        computed_s = time.monotonic()
        if self._num_layers == 0 or (isinstance(self._worker, ChoosesLayerSteps) and not self._worker.wants_layers()):
            self._forward.compute(seconds)
            return time.monotonic()
        for layer in range(self._num_layers):
            self._worker.wait_for_layer_load(layer)
            self._forward.compute(seconds / self._num_layers)
            computed_s = time.monotonic()
            self._worker.save_kv_layer(layer)
        return computed_s

    def _end_step(self) -> ConnectorOutput:
        self._worker.wait_for_save()
        due, self._due = self._due, []
        output = self._worker.get_finished(due)
        self._scheduler.update_from_output(output)
        self._owed -= output.finished_sending | output.failed_sending
        self.stats.add(output.stats)
        return output

    def _look_up(self, request: KVRequest) -> MatchResult:
        matches: list[MatchResult] = []

        def is_answered() -> bool:
            matches.append(self._scheduler.get_num_new_matched_tokens(request, 0))
            return matches[-1].num_tokens is not None

        if not is_answered():
            self._step_until(is_answered, "looking up")
        return matches[-1]

    def _wait_for_load(self, request_id: str, num_tokens: int) -> None:
        good: list[int] = []

        def take(output: ConnectorOutput) -> None:
            if request_id in output.finished_receiving:
                good.append(num_tokens)
            elif request_id in output.failed_receiving:
                good.append(output.failed_receiving[request_id])

        self._step_until(lambda: bool(good), "loading", take)
        if good[0] != num_tokens:
            raise HandOffError(f"{good[0]} of {num_tokens} tokens arrived; failures {self.stats.failures}")

    def _step_until(
        self,
        is_done: Callable[[], bool],
        what: str,
        take: Callable[[ConnectorOutput], None] = lambda output: None,
    ) -> None:
        began_s = time.monotonic()
        take(self.step())
        while not is_done():
            waited_s = time.monotonic() - began_s
            if waited_s > _TIMEOUT_S:
                raise HandOffError(f"{what} took longer than {_TIMEOUT_S:g} s; failures {self.stats.failures}")
            self._inbox.take(get_transfer_poll_s(waited_s))
            take(self.step())

    def _build_request(self, token_ids: Sequence[int], params: KVTransferParams | None) -> KVRequest:
        keys = self._hasher.block_keys(token_ids, self._context.spec.block_size)
        return KVRequest(f"bench-{next(self._serials)}", len(token_ids), tuple(keys), params)
