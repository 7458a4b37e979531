"""Direct connectors that break one rule each: `HonestDirect` with one thing wrong."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
from honest_direct import ENDPOINTS, DirectScheduler, DirectWorker, Endpoint, Hold, HonestDirect, Pull

from pdserve.connectors.base import ConnectorOutput, FinishDecision, KVRequest
from pdserve.protocol import KVTransferParams

BROKEN: list[tuple[type[HonestDirect], str]] = []


def breaks(
    rule: str, scheduler: type[DirectScheduler] = DirectScheduler, worker: type[DirectWorker] = DirectWorker
) -> None:
    """Register a connector made of these halves; it is called as the half that is wrong."""
    name = (worker if scheduler is DirectScheduler else scheduler).__name__
    BROKEN.append((type(name, (HonestDirect,), {"scheduler_type": scheduler, "worker_type": worker}), rule))


class AsksTwiceForOneTransfer(DirectScheduler):
    """Remembers a request's parameters, also when the engine has taken them away after the load."""

    remembered: ClassVar[dict[str, KVTransferParams]] = {}

    def get_params(self, request: KVRequest) -> KVTransferParams | None:
        params = request.kv_transfer_params
        if params is not None:
            self.remembered[f"{id(self)}:{request.request_id}"] = params
        return self.remembered.get(f"{id(self)}:{request.request_id}")

    def is_offered(self, params: KVTransferParams) -> bool:
        return True


class HoldsNothing(DirectScheduler):
    """Frees the blocks when the request ends, and offers them all the same."""

    def decide(self, params: KVTransferParams) -> FinishDecision:
        return FinishDecision(hold_blocks=False, kv_transfer_params=params)


class SentBeforeFetched(DirectWorker):
    """Reports a send as soon as it is asked for it."""

    def collect_sends(self) -> set[str]:
        done, self.waiting = self.waiting, set()
        self.endpoint.ended -= done
        return done


class HearsNoNotification(DirectWorker):
    """The consumer never tells that it has the blocks."""

    def end_pull(self, pull: Pull, num_good: int, output: ConnectorOutput) -> None:
        real, self.end_at_producer = self.end_at_producer, lambda *_: None  # type: ignore[method-assign]
        super().end_pull(pull, num_good, output)
        self.end_at_producer = real  # type: ignore[method-assign]


class BelievesTheParameters(DirectScheduler):
    """Loads what a transfer of its own model holds, whatever the prompt is."""

    def count_matching_tokens(self, request: KVRequest, params: KVTransferParams, start: int) -> int:
        hold = ENDPOINTS[self.get_address(params)].holds[self.get_transfer(params)]
        if hold.fingerprint != self.context.identity.fingerprint:
            return 0
        num_blocks = len(self.get_digests(params))
        return sum(key.num_tokens for key in request.block_keys[start:num_blocks])

    def update_state_after_alloc(
        self, request: KVRequest, block_ids: Sequence[int], num_computed_tokens: int, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, block_ids, num_computed_tokens, num_external_tokens)
        if self.pulls and self.pulls[-1].request_id == request.request_id and request.kv_transfer_params:
            pull = self.pulls.pop()
            endpoint = ENDPOINTS.get(pull.endpoint)
            hold = None if endpoint is None else endpoint.holds.get(pull.transfer_id)
            digests = [] if hold is None else hold.digests[pull.first : pull.first + len(pull.block_ids)]
            self.pulls.append(msgspec.structs.replace(pull, digests=digests or pull.digests))


class RefusesWithoutAWord(DirectScheduler):
    """Promises every offered transfer, whoever made it, and fails without a reason."""

    def count_matching_tokens(self, request: KVRequest, params: KVTransferParams, start: int) -> int:
        return sum(key.num_tokens for key in request.block_keys[start:])


class RequestIdsAsTransferIds(DirectScheduler):
    def make_transfer_id(self, request: KVRequest, number: int) -> str:
        return request.request_id


class TakesSpentTransfers(DirectWorker):
    """A transfer that was fetched stays on offer; only an expired one is taken back."""

    def forget_hold(self, endpoint: Endpoint, hold: Hold) -> None:
        if self.is_expired(endpoint, hold.transfer_id):
            super().forget_hold(endpoint, hold)


class NeverReaps(DirectWorker):
    def reap(self) -> None:
        pass


class ReapsOneOfMany(DirectWorker):
    """Looks at the oldest hold only, once, and stops."""

    def reap(self) -> None:
        for transfer_id in list(self.endpoint.holds)[:1]:
            if self.is_expired(self.endpoint, transfer_id) and not hasattr(self, "has_reaped"):
                self.has_reaped = True
                self.endpoint.end(transfer_id)


class WallClockLease(DirectWorker):
    def now(self) -> float:
        return time.time()


class ReadsAfterExpiry(DirectWorker):
    """Frees the blocks at the lease's end, and goes on serving them."""

    def forget_hold(self, endpoint: Endpoint, hold: Hold) -> None:
        if not self.is_expired(endpoint, hold.transfer_id):
            super().forget_hold(endpoint, hold)
        else:
            endpoint.deadlines[hold.transfer_id] = float("inf")


class IgnoresCancels(DirectScheduler):
    def release(self, params: KVTransferParams) -> None:
        pass


class CancelsOnlyWhatWasAsked(DirectScheduler):
    """Frees after a full local hit, but not when the request ends before it was ever allocated."""

    def request_finished(
        self, request: KVRequest, block_ids: Sequence[int], num_computed_tokens: int, *, handoff: bool
    ) -> FinishDecision:
        self.settled.add(request.request_id)
        return super().request_finished(request, block_ids, num_computed_tokens, handoff=handoff)


class IgnoresCancelledSends(DirectScheduler):
    """Goes on waiting for a consumer that will not come."""

    def cancel_send(self, request_id: str) -> None:
        pass


class CancelsEverySend(DirectScheduler):
    """Gives up all that it holds when one of them is cancelled."""

    def cancel_send(self, request_id: str) -> None:
        holds = ENDPOINTS[self.context.engine_id].holds
        if any(hold.request_id == request_id for hold in holds.values()):
            self.cancelled += [hold.request_id for hold in holds.values()]


def get_name(engine_id: str) -> str:
    """An engine's name and run without its incarnation."""
    return engine_id.rpartition("-")[0]


class AddressesByName(DirectScheduler):
    """Knows an engine by its name, so that a restarted one answers for its past."""

    def get_address(self, params: KVTransferParams) -> str:
        return get_name(params.engine_id)

    def get_transfer(self, params: KVTransferParams) -> str:
        return str(params.payload.get("number"))

    def hold(self, hold: Hold) -> None:
        number = hold.transfer_id.rpartition(":")[2]
        hold = msgspec.structs.replace(hold, transfer_id=number)
        ENDPOINTS[get_name(self.context.engine_id)].holds[number] = hold
        self.holds.append(hold)


class AnswersForItsName(DirectWorker):
    def get_own_address(self) -> str:
        return get_name(self.context.engine_id)

    def choose_block(self, hold: Hold, pull: Pull, position: int) -> int:
        return hold.block_ids[position]


class ServesWithoutLooking(Endpoint):
    """Gives block after block of a transfer; whose they are, the reader is trusted to know."""

    def read(self, pull: Pull, index: int) -> tuple[bytes, bytes] | None:
        hold = self.holds.get(pull.transfer_id)
        position = pull.first + index
        if hold is None or position >= len(hold.digests):
            return None
        trusting = msgspec.structs.replace(pull, digests=hold.digests[pull.first :])
        return super().read(trusting, index)


class TrustingAnswersForItsName(AnswersForItsName):
    def __init__(self, context: Any) -> None:
        ENDPOINTS[get_name(context.engine_id)] = ServesWithoutLooking()
        super().__init__(context)


class WaitsForTheDead(DirectWorker):
    def advance(self, output: ConnectorOutput, request_id: str, pull: Pull, num_done: int) -> None:
        if pull.endpoint in ENDPOINTS:
            super().advance(output, request_id, pull, num_done)


class RaisesWhenThePeerIsGone(DirectWorker):
    def miss(self, pull: Pull) -> tuple[bytes, bytes] | None:
        raise ConnectionError(f"{pull.endpoint} is gone")


class BelievesBlockIds(DirectWorker):
    """Reads the blocks that the parameters name, not those that the producer holds."""

    def choose_block(self, hold: Hold, pull: Pull, position: int) -> int:
        block_ids = pull.payload.get("block_ids")
        if isinstance(block_ids, list) and position < len(block_ids) and isinstance(block_ids[position], int):
            return min(block_ids[position], len(self.rows) - 1)
        return hold.block_ids[position]


class ChokesOnOddParameters(DirectScheduler):
    def get_digests(self, params: KVTransferParams) -> list[str]:
        digests: list[str] = params.payload["digests"]
        return digests


class VerifiesNothing(DirectWorker):
    def verify(self, payload: bytes, checksum: bytes) -> bool:
        return True


breaks("R8", AsksTwiceForOneTransfer)
breaks("R10", HoldsNothing)
breaks("R10", worker=SentBeforeFetched)
breaks("R10", worker=HearsNoNotification)
breaks("R13", RefusesWithoutAWord)
breaks("R14", BelievesTheParameters)
breaks("R16", RequestIdsAsTransferIds)
breaks("R16", worker=TakesSpentTransfers)
breaks("R18", worker=NeverReaps)
breaks("R18", worker=ReapsOneOfMany)
breaks("R18", worker=WallClockLease)
breaks("R18", worker=ReadsAfterExpiry)
breaks("R18", IgnoresCancels)
breaks("R18", CancelsOnlyWhatWasAsked)
breaks("R18", IgnoresCancelledSends)
breaks("R18", CancelsEverySend)
breaks("R19", AddressesByName, TrustingAnswersForItsName)
breaks("R19", worker=WaitsForTheDead)
breaks("R19", worker=RaisesWhenThePeerIsGone)
breaks("R21", worker=VerifiesNothing)
breaks("R22", worker=BelievesBlockIds)
breaks("R22", ChokesOnOddParameters)
