"""An honest direct connector in one process: the producer holds its blocks, the consumer reads them over a "wire".

Its wire is a dictionary of endpoints. The producer's worker half owns the holds; leases run on the monotonic clock.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch

from pdserve.connectors.base import (
    ConnectorContext,
    ConnectorFeatures,
    ConnectorOutput,
    FinishDecision,
    KVRequest,
    MatchResult,
    StepPlan,
)
from pdserve.kv_layout import KVCacheSpec
from pdserve.protocol import KVTransferParams

CONNECTOR = "honest_direct"
DEFAULT_LEASE_S = 60.0


class Hold(msgspec.Struct, frozen=True):
    """Blocks kept for a consumer; the request's end is reported when they have been fetched or the lease is over."""

    request_id: str
    transfer_id: str
    fingerprint: str
    digests: list[str]
    block_ids: list[int]


class Pull(msgspec.Struct, frozen=True):
    """Blocks to read; ``first`` is the index of the first of them in the transfer."""

    request_id: str
    num_tokens: int
    endpoint: str
    transfer_id: str
    first: int
    digests: list[str]
    sizes: list[int]
    block_ids: list[int]
    payload: dict[str, Any]


class Metadata(msgspec.Struct, frozen=True):
    holds: list[Hold] = []
    pulls: list[Pull] = []
    releases: list[tuple[str, str]] = []
    cancelled: list[str] = []


class DirectScheduler:
    def __init__(self, context: ConnectorContext) -> None:
        self.context = context
        self.size = context.spec.block_size
        self.serial = itertools.count()
        self.holds: list[Hold] = []
        self.pulls: list[Pull] = []
        self.releases: list[tuple[str, str]] = []
        self.cancelled: list[str] = []
        self.settled: set[str] = set()

    # --- consumer -------------------------------------------------------------------------------------------

    def get_params(self, request: KVRequest) -> KVTransferParams | None:
        return request.kv_transfer_params

    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> MatchResult:
        params = self.get_params(request)
        start, offset = divmod(num_computed_tokens, self.size)
        if params is None or offset or not self.is_offered(params):
            return MatchResult(0)
        num_tokens = self.count_matching_tokens(request, params, start)
        return MatchResult(num_tokens, is_async=num_tokens > 0)

    def is_offered(self, params: KVTransferParams) -> bool:
        endpoint = ENDPOINTS.get(self.get_address(params))
        return endpoint is not None and self.get_transfer(params) in endpoint.holds

    def get_address(self, params: KVTransferParams) -> str:
        return params.engine_id

    def get_transfer(self, params: KVTransferParams) -> str:
        return params.transfer_id

    def get_digests(self, params: KVTransferParams) -> list[str]:
        digests = params.payload.get("digests")
        return digests if isinstance(digests, list) else []

    def count_matching_tokens(self, request: KVRequest, params: KVTransferParams, start: int) -> int:
        offered, num_tokens = self.get_digests(params), 0
        for index, key in enumerate(request.block_keys):
            if index >= len(offered) or offered[index] != key.hex:
                break
            num_tokens += key.num_tokens if index >= start else 0
        return num_tokens

    def update_state_after_alloc(
        self, request: KVRequest, block_ids: Sequence[int], num_computed_tokens: int, num_external_tokens: int
    ) -> None:
        params = self.get_params(request)
        if params is None:
            return
        self.settled.add(request.request_id)
        if not num_external_tokens:
            self.release(params)
            return
        start = num_computed_tokens // self.size
        end = self.context.spec.num_blocks_for(num_computed_tokens + num_external_tokens)
        keys = request.block_keys[start:end]
        self.pulls.append(
            Pull(
                request.request_id,
                num_external_tokens,
                self.get_address(params),
                self.get_transfer(params),
                start,
                [key.hex for key in keys],
                [key.num_tokens for key in keys],
                list(block_ids[start:end]),
                params.payload,
            )
        )

    def release(self, params: KVTransferParams) -> None:
        self.releases.append((self.get_address(params), self.get_transfer(params)))

    # --- producer -------------------------------------------------------------------------------------------

    def request_finished(
        self, request: KVRequest, block_ids: Sequence[int], num_computed_tokens: int, *, handoff: bool
    ) -> FinishDecision:
        params = request.kv_transfer_params
        if params is not None and request.request_id not in self.settled:
            self.release(params)
        self.settled.discard(request.request_id)
        if not handoff:
            return FinishDecision()
        number = next(self.serial)
        digests = [key.hex for key in request.block_keys]
        transfer_id = self.make_transfer_id(request, number)
        self.hold(Hold(request.request_id, transfer_id, self.context.identity.fingerprint, digests, list(block_ids)))
        payload = {"digests": digests, "block_ids": list(block_ids), "number": number}
        return self.decide(
            KVTransferParams(
                connector=CONNECTOR, transfer_id=transfer_id, engine_id=self.context.engine_id, payload=payload
            )
        )

    def decide(self, params: KVTransferParams) -> FinishDecision:
        return FinishDecision(hold_blocks=True, kv_transfer_params=params)

    def make_transfer_id(self, request: KVRequest, number: int) -> str:
        return f"{self.context.engine_id}:{request.request_id}:{number}"

    def cancel_send(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def hold(self, hold: Hold) -> None:
        ENDPOINTS[self.context.engine_id].holds[hold.transfer_id] = hold  # found by lookups from now on
        self.holds.append(hold)

    def build_connector_metadata(self, plan: StepPlan) -> Any:
        metadata = Metadata(self.holds, self.pulls, self.releases, self.cancelled)
        self.holds, self.pulls, self.releases, self.cancelled = [], [], [], []
        return metadata

    def update_from_output(self, output: ConnectorOutput) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class Endpoint:
    """One incarnation of an engine on the wire."""

    worker: DirectWorker | None = None
    holds: dict[str, Hold] = field(default_factory=dict)
    deadlines: dict[str, float] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    def read(self, pull: Pull, index: int) -> tuple[bytes, bytes] | None:
        """A block of a transfer and its checksum; None when the transfer is not, or no longer, on offer."""
        hold = self.holds.get(pull.transfer_id)
        position = pull.first + index
        if self.worker is None or hold is None or position >= len(hold.digests):
            return None
        if hold.digests[position] != pull.digests[index] or self.worker.is_expired(self, hold.transfer_id):
            return None
        payload = self.worker.rows[self.worker.choose_block(hold, pull, position)].tobytes()
        return payload, hashlib.sha256(payload).digest()

    def end(self, transfer_id: str) -> None:
        """Fetched, cancelled or expired."""
        hold = self.holds.get(transfer_id)
        if hold is not None and self.worker is not None:
            self.worker.forget_hold(self, hold)
            self.ended.add(hold.request_id)


ENDPOINTS: dict[str, Endpoint] = {}


class DirectWorker:
    def __init__(self, context: ConnectorContext) -> None:
        self.context = context
        self.lease_s = float(context.options.get("lease_s", DEFAULT_LEASE_S))
        self.endpoint = ENDPOINTS.setdefault(self.get_own_address(), Endpoint())
        self.endpoint.worker = self
        self.pulls: dict[str, tuple[Pull, int]] = {}
        self.waiting: set[str] = set()

    def get_own_address(self) -> str:
        return self.context.engine_id

    def now(self) -> float:
        return time.monotonic()

    def register_kv_caches(self, kv_cache: torch.Tensor, spec: KVCacheSpec) -> None:
        rows: np.ndarray = kv_cache.reshape(kv_cache.shape[0], -1).view(torch.uint8).numpy()
        self.rows = rows

    def start_load_kv(self, metadata: Metadata) -> None:
        for hold in metadata.holds:
            self.endpoint.deadlines.setdefault(hold.transfer_id, self.now() + self.lease_s)
        for pull in metadata.pulls:
            self.pulls.setdefault(pull.request_id, (pull, 0))
        for address, transfer_id in metadata.releases:
            self.end_at_producer(address, transfer_id)
        for hold in list(self.endpoint.holds.values()):
            if hold.request_id in metadata.cancelled:
                self.endpoint.end(hold.transfer_id)

    def end_at_producer(self, address: str, transfer_id: str) -> None:
        endpoint = ENDPOINTS.get(address)
        if endpoint is not None:
            endpoint.end(transfer_id)

    def wait_for_layer_load(self, layer: int) -> None:
        pass

    def save_kv_layer(self, layer: int) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_request_ids: Sequence[str]) -> ConnectorOutput:
        output = ConnectorOutput()
        held = {hold.request_id for hold in self.endpoint.holds.values()}
        self.waiting.update((held | self.endpoint.ended).intersection(finished_request_ids))
        self.reap()
        output.finished_sending = self.collect_sends()
        for request_id, (pull, num_done) in list(self.pulls.items()):
            self.advance(output, request_id, pull, num_done)
        return output

    def collect_sends(self) -> set[str]:
        done = self.waiting & self.endpoint.ended
        self.waiting -= done
        self.endpoint.ended -= done
        return done

    def reap(self) -> None:
        for transfer_id in list(self.endpoint.holds):
            if self.is_expired(self.endpoint, transfer_id):
                self.endpoint.end(transfer_id)

    def is_expired(self, endpoint: Endpoint, transfer_id: str) -> bool:
        return self.now() >= endpoint.deadlines.get(transfer_id, float("inf"))

    def forget_hold(self, endpoint: Endpoint, hold: Hold) -> None:
        del endpoint.holds[hold.transfer_id]
        endpoint.deadlines.pop(hold.transfer_id, None)

    def choose_block(self, hold: Hold, pull: Pull, position: int) -> int:
        return hold.block_ids[position]

    def advance(self, output: ConnectorOutput, request_id: str, pull: Pull, num_done: int) -> None:
        """One block a step; the producer hears when the last one has arrived, or that none will."""
        endpoint = ENDPOINTS.get(pull.endpoint)
        found = endpoint.read(pull, num_done) if endpoint is not None else self.miss(pull)
        if found is None or not self.verify(*found):
            self.end_pull(pull, sum(pull.sizes[:num_done]), output)
            return
        self.rows[pull.block_ids[num_done]] = np.frombuffer(found[0], dtype=np.uint8)
        num_done += 1
        self.pulls[request_id] = (pull, num_done)
        if num_done == len(pull.block_ids):
            self.end_pull(pull, pull.num_tokens, output)

    def miss(self, pull: Pull) -> tuple[bytes, bytes] | None:
        """The producer is gone."""
        return None

    def verify(self, payload: bytes, checksum: bytes) -> bool:
        return hashlib.sha256(payload).digest() == checksum and len(payload) == self.context.spec.block_bytes

    def end_pull(self, pull: Pull, num_good: int, output: ConnectorOutput) -> None:
        del self.pulls[pull.request_id]
        self.end_at_producer(pull.endpoint, pull.transfer_id)
        if num_good >= pull.num_tokens:
            output.finished_receiving.add(pull.request_id)
        else:
            output.failed_receiving[pull.request_id] = num_good

    def close(self) -> None:
        if self.endpoint.worker is self:
            ENDPOINTS.pop(self.get_own_address(), None)


class HonestDirect:
    features: ClassVar[ConnectorFeatures] = ConnectorFeatures(can_save=True, can_load=True, cancels_sends=True)
    scheduler_type: ClassVar[type[DirectScheduler]] = DirectScheduler
    worker_type: ClassVar[type[DirectWorker]] = DirectWorker

    @classmethod
    def build_scheduler(cls, context: ConnectorContext) -> DirectScheduler:
        return cls.scheduler_type(context)

    @classmethod
    def build_worker(cls, context: ConnectorContext) -> DirectWorker:
        return cls.worker_type(context)
