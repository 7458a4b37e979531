"""Plays the engine around one connector: scheduler, model runner, block pool and clock of steps.

It is stricter than an engine: blocks are poisoned when they are freed, loaded blocks are compared byte for byte
with what the model would compute, and every report is checked against what is owed. A breach raises
`RuleViolationError` with the rule's number in DESIGN's list of connector rules.

A request's way::

    submit ─> lookup ─> admit ──(load under way)──> step … ─> finish ─> step until nothing is owed
                          └──(nothing to load)───────┘
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from pdserve.connectors.base import (
    ConnectorContext,
    ConnectorOutput,
    ConnectorStats,
    FinishDecision,
    KVConnector,
    KVRequest,
    MatchResult,
    ScheduledTokens,
    StepPlan,
)
from pdserve.connectors.testing.kv_content import Bytes, KVContent
from pdserve.kv_layout import DTYPE_BYTES, BlockHasher
from pdserve.protocol import KVTransferParams

_POISON = 0xA5
_IDLE_STEP_S = 0.0002


class RuleViolationError(AssertionError):
    """The connector broke a rule of the contract."""


@dataclass
class _Live:
    """One request and what the engine keeps for it."""

    request: KVRequest
    token_ids: Sequence[int]
    salt: str
    block_ids: list[int] = field(default_factory=list)
    num_local_tokens: int = 0
    num_computed_tokens: int = 0
    num_loading_tokens: int = 0
    is_finished: bool = False
    is_held: bool = False


class EngineHarness:
    """One engine with one connector.

    Args:
        connector: the class under test.
        context: what its halves are built with.
        num_blocks: size of the pool.
    """

    def __init__(self, connector: type[KVConnector], context: ConnectorContext, *, num_blocks: int = 64) -> None:
        self.context = context
        self.content = KVContent(context.identity.fingerprint, context.spec)
        self.scheduler = connector.build_scheduler(context)
        self.worker = connector.build_worker(context)
        self.stats = ConnectorStats()
        self.sent: dict[str, bool] = {}
        """Requests reported sent, and whether they were saved whole."""
        self.received: dict[str, int] = {}
        """Requests whose load ended, and how many tokens of it are good."""
        spec = context.spec
        dtype = getattr(torch, spec.dtype)
        self._kv_cache = torch.zeros((num_blocks, *spec.block_shape), dtype=dtype)
        per_token = (num_blocks, -1, spec.block_size, spec.head_dim * DTYPE_BYTES[spec.dtype])
        self._bytes: Bytes = self._kv_cache.view(torch.uint8).numpy().reshape(per_token)
        self._bytes[:] = _POISON
        self._layerwise = connector.features.layerwise
        self._free = list(range(num_blocks))
        self._num_blocks = num_blocks
        self._live: dict[str, _Live] = {}
        self._owed_sent: set[str] = set()
        self._due: list[str] = []
        self.worker.register_kv_caches(self._kv_cache, spec)

    # --- what a test does -----------------------------------------------------------------------------------

    def submit(
        self, request_id: str, token_ids: Sequence[int], *, salt: str = "", params: KVTransferParams | None = None
    ) -> KVRequest:
        """A request arrives."""
        hasher = BlockHasher(self.context.identity.fingerprint, cache_salt=salt)
        keys = hasher.block_keys(token_ids, self.context.spec.block_size)
        request = KVRequest(request_id, len(token_ids), tuple(keys), params)
        self._live[request_id] = _Live(request, tuple(token_ids), salt)
        return request

    def lookup(self, request_id: str, num_local_tokens: int = 0) -> MatchResult:
        """Ask the connector; twice, as after a failed allocation, for asking must have no consequences."""
        request = self._live[request_id].request
        self.scheduler.get_num_new_matched_tokens(request, num_local_tokens)
        match = self.scheduler.get_num_new_matched_tokens(request, num_local_tokens)
        if num_local_tokens + (match.num_tokens or 0) > max(request.num_prompt_tokens, num_local_tokens):
            raise RuleViolationError(f"R5: {match} beyond {num_local_tokens} claims more than the prompt")
        if match.is_async and not match.num_tokens:
            raise RuleViolationError(f"R3: {match} promises a load of nothing")
        return match

    def admit(self, request_id: str, num_external_tokens: int, num_local_tokens: int = 0) -> list[int]:
        """Allocate the request's blocks and tell the connector; local tokens are in place already."""
        live = self._live[request_id]
        spec = self.context.spec
        num_blocks = spec.num_blocks_for(live.request.num_prompt_tokens)
        live.block_ids = [self._free.pop() for _ in range(num_blocks)]
        live.num_local_tokens = live.num_computed_tokens = num_local_tokens
        self._compute(live, 0, num_local_tokens)
        live.num_loading_tokens = num_external_tokens
        self.scheduler.update_state_after_alloc(live.request, live.block_ids, num_local_tokens, num_external_tokens)
        return live.block_ids

    def step(self, scheduled: Mapping[str, int] | None = None, preempted: Sequence[str] = ()) -> ConnectorOutput:
        """One engine step: ``scheduled`` tokens of each request are computed."""
        chosen = [(self._live[request_id], num_tokens) for request_id, num_tokens in (scheduled or {}).items()]
        for request_id in preempted:
            self._release(self._live[request_id])
        plan = StepPlan(
            [
                ScheduledTokens(live.request, tuple(live.block_ids), live.num_computed_tokens, num_tokens)
                for live, num_tokens in chosen
            ],
            tuple(preempted),
        )
        metadata = self.scheduler.build_connector_metadata(plan)
        self.worker.start_load_kv(metadata)
        for live, num_tokens in chosen:
            self._compute(live, live.num_computed_tokens, num_tokens)
        if self._layerwise:
            for layer in range(self.context.spec.num_layers):
                self.worker.wait_for_layer_load(layer)
                self.worker.save_kv_layer(layer)
        self.worker.wait_for_save()
        due, self._due = self._due, []
        output = self.worker.get_finished(due)
        self.scheduler.update_from_output(output)
        for live, num_tokens in chosen:
            live.num_computed_tokens += num_tokens
        self._take_report(output)
        return output

    def finish(self, request_id: str, *, handoff: bool = False) -> FinishDecision:
        """The request ends now, wherever it stands; an abort unless it is handed over."""
        live = self._live[request_id]
        decision = self.scheduler.request_finished(
            live.request, live.block_ids, live.num_computed_tokens, handoff=handoff
        )
        if decision.hold_blocks and not handoff:
            raise RuleViolationError(f"R9: blocks of {request_id} are held, but nobody comes for them")
        live.is_finished = True
        live.is_held = decision.hold_blocks
        if decision.expects_sent:
            self._owed_sent.add(request_id)
            self._due.append(request_id)
        self._release_if_free(live)
        return decision

    def step_until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
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
        """Close both halves."""
        self.worker.close()
        self.scheduler.close()

    # --- whole legs ------------------------------------------------------------------------------------------

    def prefill(
        self, request_id: str, token_ids: Sequence[int], *, chunk: int | None = None, salt: str = ""
    ) -> FinishDecision:
        """Compute a whole prompt without asking the connector, in chunks, and hand it over."""
        self.submit(request_id, token_ids, salt=salt)
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
        return self._num_blocks - len(self._free)

    @property
    def is_idle(self) -> bool:
        """Whether the connector owes no report."""
        return not self._owed_sent and not any(live.num_loading_tokens for live in self._live.values())

    def read_block(self, block_id: int) -> Bytes:
        """A block's bytes, ``[L·2·K, S, H bytes]``."""
        block: Bytes = self._bytes[block_id]
        return block

    # --- the engine's part --------------------------------------------------------------------------------------

    def _compute(self, live: _Live, start: int, num_tokens: int) -> None:
        size = self.context.spec.block_size
        for position in range(start, min(start + num_tokens, len(live.token_ids))):
            block, slot = live.block_ids[position // size], position % size
            self._bytes[block, :, slot] = self.content.get_token(live.token_ids, position, live.salt)

    def _take_report(self, output: ConnectorOutput) -> None:
        self.stats.add(output.stats)
        for request_id in output.finished_sending:
            self._take_sent(request_id, whole=request_id not in output.failed_sending)
        for request_id in output.finished_receiving:
            self._take_received(request_id, None)
        for request_id, num_good_tokens in output.failed_receiving.items():
            self._take_received(request_id, num_good_tokens)

    def _take_sent(self, request_id: str, *, whole: bool) -> None:
        if request_id not in self._owed_sent:
            raise RuleViolationError(f"R9/R10: {request_id} was reported sent, which nobody waits for")
        self._owed_sent.discard(request_id)
        self.sent[request_id] = whole
        live = self._live[request_id]
        live.is_held = False
        self._release_if_free(live)

    def _take_received(self, request_id: str, num_good_tokens: int | None) -> None:
        live = self._live.get(request_id)
        if live is None or not live.num_loading_tokens:
            raise RuleViolationError(f"R9: the load of {request_id} was reported, which nobody waits for")
        good = live.num_loading_tokens if num_good_tokens is None else num_good_tokens
        if num_good_tokens is not None and good >= live.num_loading_tokens:
            raise RuleViolationError(f"R4: {request_id} failed with {good} good tokens of {live.num_loading_tokens}")
        live.num_loading_tokens = 0
        live.num_computed_tokens += good
        self.received[request_id] = good
        self._check_loaded(live)
        self._release_if_free(live)

    def _check_loaded(self, live: _Live) -> None:
        size = self.context.spec.block_size
        for position in range(live.num_local_tokens, live.num_computed_tokens):
            found = self._bytes[live.block_ids[position // size], :, position % size]
            if not (found == self.content.get_token(live.token_ids, position, live.salt)).all():
                raise RuleViolationError(f"R14: token {position} of {live.request.request_id} has foreign KV")

    def _release_if_free(self, live: _Live) -> None:
        if live.is_finished and not live.is_held and not live.num_loading_tokens:
            self._release(live)
            if live.request.request_id not in self._owed_sent:
                del self._live[live.request.request_id]

    def _release(self, live: _Live) -> None:
        """Free the blocks, and write over them: a connector that still reads them saves garbage."""
        self._bytes[live.block_ids] = _POISON
        self._free.extend(live.block_ids)
        live.block_ids = []
        live.num_computed_tokens = 0
