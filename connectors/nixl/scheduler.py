"""The half beside the scheduler: which requests' blocks are offered, and which references are redeemed.

It moves nothing and asks nobody: whether a reference is still good shows when it is redeemed.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence

from pdserve.connectors.base import (
    ConnectorContext,
    ConnectorOutput,
    FinishDecision,
    KVRequest,
    MatchResult,
    StepPlan,
)
from pdserve.connectors.nixl.filled_blocks import FilledBlockWatch
from pdserve.connectors.nixl.leases import build_transfer_id
from pdserve.connectors.nixl.messages import (
    Endpoint,
    Listening,
    Load,
    Offer,
    StepMetadata,
    TransferReference,
    build_params,
    read_params,
)

_NO_MATCH = MatchResult(0)


class NixlScheduler:
    """Lives on the engine's main thread.

    Args:
        context: the engine.
        lease_s: how long this engine's blocks wait for a consumer.
    """

    def __init__(self, context: ConnectorContext, lease_s: float) -> None:
        self._kv = context.identity.kv
        self._lease_s = lease_s
        self._num_ranks = context.rank.size
        self._endpoints: dict[int, Endpoint] = {}
        self._serials = itertools.count()
        self._redeemed: set[str] = set()
        self._loading: set[str] = set()
        self._watch = FilledBlockWatch(self._kv.block_size)
        self._forgotten: list[str] = []
        self._offers: list[Offer] = []
        self._loads: list[Load] = []
        self._releases: list[TransferReference] = []
        self._cancelled_loads: list[str] = []
        self._cancelled_offers: list[str] = []
        self._queued: dict[str, TransferReference] = {}

    def request_queued(self, request: KVRequest) -> None:
        """Let the producer hear that the request waits, unless it gets its turn in the same step."""
        reference = self._get_reference(request)
        if reference is not None:
            self._queued[request.request_id] = reference

    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> MatchResult:
        """The rest of the prompt, when the request brings a reference that was not redeemed before.

        The producer has the whole prompt or nothing. Blocks are loaded whole, so a count inside a block is answered
        with 0: a load would write to a block whose first tokens the engine already has, and may share.
        """
        if self._get_reference(request) is None or num_computed_tokens % self._kv.block_size:
            return _NO_MATCH
        num_tokens = request.num_prompt_tokens - num_computed_tokens
        return MatchResult(num_tokens, is_async=True) if num_tokens > 0 else _NO_MATCH

    def update_state_after_alloc(
        self,
        request: KVRequest,
        block_ids: Sequence[int],
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        """Redeem the reference: load what is missing, or, when nothing is, let the producer have its blocks back."""
        reference = self._get_reference(request)
        if reference is None:
            return
        self._redeemed.add(request.request_id)
        self._queued.pop(request.request_id, None)
        if num_external_tokens <= 0:
            self._releases.append(reference)
            return
        first = num_computed_tokens // self._kv.block_size
        end = self._kv.num_blocks_for(num_computed_tokens + num_external_tokens)
        self._loading.add(request.request_id)
        self._loads.append(
            Load(
                request_id=request.request_id,
                reference=reference,
                digest=request.block_keys[-1].digest,
                num_prompt_tokens=request.num_prompt_tokens,
                first_block=first,
                num_tokens=num_external_tokens,
                block_ids=list(block_ids[first:end]),
            )
        )

    def build_connector_metadata(self, plan: StepPlan) -> StepMetadata:
        """What was noted since the last step, and what the last one has filled of prompts that go on."""
        self._forgotten += [name for name in plan.preempted_request_ids if self._watch.forget(name)]
        metadata = StepMetadata(
            list(self._watch.find_new(plan)) if self._is_listening else [],
            self._forgotten,
            self._offers,
            self._loads,
            self._releases,
            self._cancelled_loads,
            self._cancelled_offers,
            list(self._queued.values()),
            computes=bool(plan.scheduled),
        )
        self._forgotten, self._offers, self._loads, self._releases = [], [], [], []
        self._cancelled_loads, self._cancelled_offers, self._queued = [], [], {}
        return metadata

    def update_from_output(self, output: ConnectorOutput) -> None:
        """Learn where the worker halves listen, and which loads have ended."""
        for message in output.messages:
            if isinstance(message, Listening):
                self._endpoints[message.rank] = message.endpoint
        self._loading.difference_update(output.finished_receiving, output.failed_receiving)

    def request_finished(
        self, request: KVRequest, block_ids: Sequence[int], num_computed_tokens: int, *, handoff: bool
    ) -> FinishDecision:
        """Hold a handed-over request's blocks; give back what the request was to fetch and did not."""
        request_id = request.request_id
        reference = self._get_reference(request)
        if reference is not None:
            self._queued.pop(request_id, None)
            self._releases.append(reference)
        if request_id in self._loading:
            self._loading.discard(request_id)
            self._cancelled_loads.append(request_id)
        self._redeemed.discard(request_id)
        has_filled = self._watch.forget(request_id)
        num_blocks = len(request.block_keys)
        is_whole = num_computed_tokens >= request.num_prompt_tokens and len(block_ids) >= num_blocks > 0
        if not handoff or not is_whole or not self._is_listening:
            if has_filled:
                self._forgotten.append(request_id)
            return FinishDecision()
        ranks = [self._endpoints[rank] for rank in range(self._num_ranks)]
        offer = Offer(
            request_id=request_id,
            transfer_id=build_transfer_id(ranks[0].generation, next(self._serials), secrets.token_hex(8)),
            num_tokens=request.num_prompt_tokens,
            digest=request.block_keys[-1].digest,
            block_ids=list(block_ids[:num_blocks]),
        )
        self._offers.append(offer)
        num_bytes = num_blocks * self._kv.block_bytes
        params = build_params(ranks, offer, lease_s=self._lease_s, num_bytes=num_bytes)
        return FinishDecision(hold_blocks=True, kv_transfer_params=params)

    def cancel_send(self, request_id: str) -> None:
        """Nobody will come for the request's blocks: the worker half ends its lease in the next step."""
        self._cancelled_offers.append(request_id)

    def close(self) -> None:
        """Nothing is held here."""

    @property
    def _is_listening(self) -> bool:
        """Whether consumers can reach all ranks."""
        return len(self._endpoints) == self._num_ranks

    def _get_reference(self, request: KVRequest) -> TransferReference | None:
        """The request's reference, until it is redeemed: it is good for one load, whatever that load brings.

        Also one that cannot be of this prompt, as from a producer with another block size: the load that fails says so.
        """
        return None if request.request_id in self._redeemed else read_params(request.kv_transfer_params)
