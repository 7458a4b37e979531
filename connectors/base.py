"""The connector contract: how KV moves between engines.

A connector has two halves that share no memory. `KVConnectorScheduler` lives beside the scheduler and decides
with counts and block ids; `KVConnectorWorker` lives beside each model runner and moves bytes. Between them go
messages: metadata down with each step, `ConnectorOutput` up.

One step, in order (also on steps with no tokens, so that transfers progress while the engine idles)::

    scheduler half                                worker half
    request_queued               a hand-off came, if heard
    get_num_new_matched_tokens   admission
    update_state_after_alloc     admission
    build_connector_metadata     end of schedule
                                                  start_load_kv
                                                  wait_for_layer_load / save_kv_layer   each layer, if layerwise
                                                  wait_for_save
                                                  get_finished
    update_from_output
    request_finished             once a request

This module knows nothing of engines, schedulers or models: connectors get plain values, so one can be tested
alone and a third party depends on ``pdserve.connectors`` only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from pdserve.kv_layout import BlockKey, KVCacheSpec, ModelIdentity, Rank
from pdserve.protocol import KVTransferParams, Role

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ConnectorFeatures:
    """What a connector declares; the conformance kit holds it to each.

    Attributes:
        can_save: it saves or holds KV that other engines can fetch.
        can_load: it loads KV.
        is_store: blocks are addressed by key and outlive the producer.
        layerwise: it wants `save_kv_layer` and `wait_for_layer_load`; in all steps, unless its worker half is a
            `ChoosesLayerSteps`.
        cancels_sends: its scheduler half is a `CancelsSends`.
        hears_of_queue: its scheduler half is a `HearsOfQueue`.
        wakes_engine: its worker half is a `WakesEngine`.
        ranks: it serves engines of several ranks, and its class is a `ServesRanks`.
    """

    can_save: bool = False
    can_load: bool = False
    is_store: bool = False
    layerwise: bool = False
    cancels_sends: bool = False
    hears_of_queue: bool = False
    wakes_engine: bool = False
    ranks: bool = False


@dataclass(frozen=True, slots=True)
class ConnectorContext:
    """What a connector is built with.

    Attributes:
        engine_id: this engine, unique for each start of the process.
        role: PREFILL engines save, DECODE engines load; both may look up.
        identity: the model's identity, the same in all ranks; its fingerprint is the root of every block key.
        spec: shape of this rank's share of a block; all of it where there is one rank.
        options: the connector's own settings, as the user wrote them.
        rank: whose share; the scheduler half is built with rank 0's.
    """

    engine_id: str
    role: Role
    identity: ModelIdentity
    spec: KVCacheSpec
    options: Mapping[str, Any] = field(default_factory=dict)
    rank: Rank = field(default_factory=Rank)


@dataclass(frozen=True, slots=True)
class KVRequest:
    """A request, as connectors see it.

    Attributes:
        request_id: the engine's internal id, unique in this engine's life.
        num_prompt_tokens: tokens of the prompt; only prompt KV travels.
        block_keys: identity of each block of the prompt, in order; the last may be partial.
        kv_transfer_params: from the producer, through the router; None for a request that was not handed over.
    """

    request_id: str
    num_prompt_tokens: int
    block_keys: Sequence[BlockKey]
    kv_transfer_params: KVTransferParams | None = None


@dataclass(frozen=True, slots=True)
class MatchResult:
    """Answer of a lookup.

    Attributes:
        num_tokens: tokens **beyond** those computed locally that can be loaded now; None = ask again next step.
        is_async: the load runs beside later steps and its end is reported by `get_finished`. False when
            ``num_tokens`` is 0 or None.
        part: which part of a composition has the tokens, by its name; empty = the connector itself.
    """

    num_tokens: int | None
    is_async: bool = False
    part: str = ""


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """What one step computes for one request.

    Attributes:
        request: the request.
        block_ids: its whole block table, in order.
        num_computed_tokens: tokens whose KV stands in the blocks before this step.
        num_scheduled_tokens: tokens that this step computes; their KV stands there after the forward pass.
    """

    request: KVRequest
    block_ids: Sequence[int]
    num_computed_tokens: int
    num_scheduled_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The part of a scheduling decision that connectors need.

    Attributes:
        scheduled: every request that runs in this step.
        preempted_request_ids: requests whose blocks were taken in this step.
    """

    scheduled: Sequence[ScheduledTokens]
    preempted_request_ids: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class FinishDecision:
    """What becomes of a finished request's KV.

    Attributes:
        hold_blocks: the connector owns the blocks until `get_finished` reports the request sent.
        kv_transfer_params: goes to the consumer through the router; None = nothing to fetch.
        announce_when_sent: hand the parameters out only when the request is reported sent (a store whose writes
            are still under way); with ``hold_blocks`` False the blocks are free at once.
    """

    hold_blocks: bool = False
    kv_transfer_params: KVTransferParams | None = None
    announce_when_sent: bool = False

    @property
    def expects_sent(self) -> bool:
        """Whether exactly one report of this request's sending will come."""
        return self.hold_blocks or self.announce_when_sent


@dataclass(slots=True)
class ConnectorStats:
    """Counters since the last report; plain sums, so they add up over ranks and children.

    A block counts as loaded when it has arrived and was verified, as saved when it is stored or was fetched, and not
    when it was stored already; bytes are its KV's. Seconds are those that the connector's threads spent, so two loads
    side by side count twice.
    """

    num_blocks_saved: int = 0
    num_bytes_saved: int = 0
    save_seconds: float = 0.0
    num_blocks_loaded: int = 0
    num_bytes_loaded: int = 0
    load_seconds: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)
    """By kind: ``missing``, ``truncated``, ``corrupt``, ``foreign``, ``no_space``, ``io``, ``timeout``, …"""

    def count_failure(self, kind: str) -> None:
        """Add one failure of ``kind``."""
        self.failures[kind] = self.failures.get(kind, 0) + 1

    def add(self, other: ConnectorStats) -> None:
        """Add ``other``'s counters to this one's."""
        self.num_blocks_saved += other.num_blocks_saved
        self.num_bytes_saved += other.num_bytes_saved
        self.save_seconds += other.save_seconds
        self.num_blocks_loaded += other.num_blocks_loaded
        self.num_bytes_loaded += other.num_bytes_loaded
        self.load_seconds += other.load_seconds
        for kind, count in other.failures.items():
            self.failures[kind] = self.failures.get(kind, 0) + count


@dataclass(slots=True)
class ConnectorOutput:
    """What a worker half reports after a step.

    Attributes:
        finished_sending: requests whose send ended, well or not; each once.
        failed_sending: the subset that could not be saved whole.
        finished_receiving: requests whose asynchronous load ended well; each load once.
        failed_receiving: requests whose load ended badly, and how many tokens from the load's start are good.
        invalid_block_ids: blocks that a synchronous load in this step did not fill.
        received_bytes: bytes loaded for each request that ended in this report.
        sent_bytes: bytes saved for each request that ended in this report.
        stats: counters since the last report; a composition's are the sums of its parts'.
        parts: a composition's counters by its parts' names, its own among them; empty = all are the connector's own.
        messages: the connector's own words from its worker halves to its scheduler half, as `ConnectorMetadata`
            is downwards: plain data that nobody else reads.
    """

    finished_sending: set[str] = field(default_factory=set)
    failed_sending: set[str] = field(default_factory=set)
    finished_receiving: set[str] = field(default_factory=set)
    failed_receiving: dict[str, int] = field(default_factory=dict)
    invalid_block_ids: set[int] = field(default_factory=set)
    received_bytes: dict[str, int] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)
    stats: ConnectorStats = field(default_factory=ConnectorStats)
    parts: dict[str, ConnectorStats] = field(default_factory=dict)
    messages: list[Any] = field(default_factory=list)


ConnectorMetadata = Any
"""A step's message from a connector's scheduler half to its worker halves: plain data (a msgspec Struct, a
dataclass of plain values) that only the connector itself reads."""


class KVConnectorScheduler(Protocol):
    """The half beside the scheduler: counts, block ids and keys; no tensors, no blocking I/O."""

    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> MatchResult:
        """How many tokens beyond ``num_computed_tokens`` can be loaded.

        Called by: the scheduler, when a waiting request is considered, also again after a failed allocation.
        Must not: change any state, promise what cannot be loaded now, count a partial block as a full one, or
        count tokens past the prompt. The scheduler itself keeps one token back to compute where it needs one.
        ``num_computed_tokens`` may lie beyond the prompt (a resumed request) or inside a block; that block's
        first tokens may be shared, so a connector that moves whole blocks answers 0 there.
        On failure: answer 0; never raise.
        """
        ...

    def update_state_after_alloc(
        self,
        request: KVRequest,
        block_ids: Sequence[int],
        num_computed_tokens: int,
        num_external_tokens: int,
    ) -> None:
        """The request has its blocks; load ``num_external_tokens`` tokens into them.

        Called by: the scheduler, once for each successful admission, also when the count is 0. ``block_ids``
        is the whole block table. The tokens to load start at ``num_computed_tokens``: those before it are local
        and lie in the first blocks. The count may be less than was promised, also by a part of a block. Decide by
        the count, not by the blocks. A load noted here goes out with the next metadata and is reported even if the
        request ends in between: its blocks wait for it.
        """
        ...

    def build_connector_metadata(self, plan: StepPlan) -> ConnectorMetadata:
        """This step's message to the workers; resets the step's state and changes nothing else.

        Called by: the scheduler, exactly once a step, also when nothing is scheduled.
        """
        ...

    def update_from_output(self, output: ConnectorOutput) -> None:
        """What the workers report. Called once a step, before the scheduler acts on it."""
        ...

    def request_finished(
        self, request: KVRequest, block_ids: Sequence[int], num_computed_tokens: int, *, handoff: bool
    ) -> FinishDecision:
        """The request ended (also: was aborted, or never ran: then ``block_ids`` is empty).

        Called by: the scheduler, exactly once for each request, before its blocks are freed. ``handoff`` is
        True when a decode engine will take the request over: its whole prompt is computed and the parameters
        in the answer reach that engine. With ``handoff`` False nobody comes for the blocks: never hold them.
        """
        ...

    def close(self) -> None:
        """Release everything; idempotent."""
        ...


@runtime_checkable
class CancelsSends(Protocol):
    """A scheduler half that gives held blocks up when it hears that no consumer will come for them."""

    def cancel_send(self, request_id: str) -> None:
        """The request was handed over, and whoever was to take it over has gone: do not wait for the lease's end.

        Called by: the scheduler, when the router gives up a request that has ended here with its blocks held; at
        most once for each, and before its sending is reported. The report comes all the same. Unknown ids, and
        those whose sending has ended meanwhile, are ignored.
        """
        ...


@runtime_checkable
class HearsOfQueue(Protocol):
    """A scheduler half that lets a producer know that somebody still waits for its turn to fetch KV."""

    def request_queued(self, request: KVRequest) -> None:
        """The request has been queued, and brings transfer parameters that it will redeem when its turn comes.

        Called by: the scheduler, once for each such request, before its first lookup. From now on what is lent to it
        is to be kept: until `update_state_after_alloc`, also with a count of 0, or `request_finished`, one of which
        is called for every request. Must not: load anything, or promise that it can be loaded.
        """
        ...


class KVConnectorWorker(Protocol):
    """The half beside a model runner: moves bytes between the KV memory and the transport."""

    def register_kv_caches(self, kv_cache: torch.Tensor, spec: KVCacheSpec) -> None:
        """Called once at start. ``kv_cache`` is ``[B, L, 2, K, S, H]``, contiguous."""
        ...

    def start_load_kv(self, metadata: ConnectorMetadata) -> None:
        """Begin the step's loads; called before the forward pass, once a step.

        ``metadata`` is all the step's message: what `wait_for_save` needs is kept from here. A step whose
        forward pass failed has no `wait_for_save`; what it was to save is dropped at the next call.
        Blocks of asynchronous loads belong to the connector until their end is reported. A synchronous load
        is done when this (or `wait_for_layer_load`, if layerwise) returns. Where it could not fill a block, the step
        computes on garbage and is done again: of that request nothing is saved in this step.
        """
        ...

    def wait_for_layer_load(self, layer: int) -> None:
        """Block until this step's synchronous loads of ``layer`` are in place. Only if layerwise.

        Layers are this rank's own, from 0.
        """
        ...

    def save_kv_layer(self, layer: int) -> None:
        """``layer``'s KV of this step's tokens stands in the cache. Only if layerwise."""
        ...

    def wait_for_save(self) -> None:
        """Called after the forward pass. When it returns, the step's blocks may be read or overwritten by others.

        Unless the request is held (`FinishDecision.hold_blocks`), the connector has its own copy by then.
        """
        ...

    def get_finished(self, finished_request_ids: Sequence[str]) -> ConnectorOutput:
        """What ended since the last call; never blocks.

        Args:
            finished_request_ids: requests for which ``request_finished`` answered that a report of their
                sending will come, each given once, in the step after. One that is unknown, or given a second
                time, is refused: it is counted and never reported.
        """
        ...

    def close(self) -> None:
        """Stop threads, release memory; idempotent. Transfers under way may be dropped."""
        ...


@runtime_checkable
class ChoosesLayerSteps(Protocol):
    """A layerwise worker half that needs its layer calls in some steps only: they cost a decode step a few percent."""

    def wants_layers(self) -> bool:
        """Whether to call `wait_for_layer_load` and `save_kv_layer` in this step.

        Called by: the model runner, in each step that computes tokens, after `start_load_kv`.
        """
        ...


@runtime_checkable
class WakesEngine(Protocol):
    """A half, usually the worker's, that says when there is something new to hear from it.

    An idle engine looks after its transfers every few milliseconds; one that is woken looks at once.
    """

    def set_wake_up(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` whenever `get_finished` has a new end to report, of a load or of a sending.

        A scheduler half calls it when it has the answer to a lookup for which it asked for patience.

        Called by: the engine, once, before its first step. ``wake`` may be called on any thread, any number of times,
        with any lock held, and when the half is closed: it returns at once and calls nothing of the connector's. Call
        it after the end can be reported, not before: the engine looks once. A call too many costs an idle engine a
        look, one that is missing a moment: it looks now and then by itself.
        """
        ...


class KVConnector(Protocol):
    """What the registry names: a class that builds the two halves from a context."""

    features: ClassVar[ConnectorFeatures]

    @classmethod
    def build_scheduler(cls, context: ConnectorContext) -> KVConnectorScheduler:
        """The scheduler half.

        Raises:
            ConfigError: an option is unknown or wrong.
        """
        ...

    @classmethod
    def build_worker(cls, context: ConnectorContext) -> KVConnectorWorker:
        """A worker half.

        Raises:
            ConfigError: an option is unknown or wrong.
        """
        ...
