"""An honest store and an honest direct connector for engines of several ranks, and what can be wrong with one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import honest_direct
import msgspec
from broken_stores import AnyShape, OwnIdentity
from honest_direct import ENDPOINTS, DirectScheduler, DirectWorker, Hold, HonestDirect
from honest_store import Block, HonestStore, Load, Metadata, StoreScheduler, StoreWorker, Transfer

from pdserve.connectors.base import ConnectorFeatures, ConnectorOutput, StepPlan
from pdserve.connectors.messages import MessageTypes
from pdserve.kv_layout import BlockKey, Rank
from pdserve.protocol import KVTransferParams

BROKEN: list[tuple[type[HonestStore] | type[HonestDirect], str]] = []


class RankedScheduler(StoreScheduler):
    def count_run(self, keys: Sequence[BlockKey]) -> int:
        num_tokens = 0
        for key in keys:
            if not all(self.name_of(key) + name_share(rank) in self.medium.entries for rank in self.ranks):
                break
            num_tokens += key.num_tokens
        return num_tokens

    @property
    def ranks(self) -> list[Rank]:
        return self.context.rank.all_ranks


class RankedWorker(StoreWorker):
    def start_load_kv(self, metadata: Metadata) -> None:
        loads, saves = ([self.take_share(item) for item in items] for items in (metadata.loads, metadata.saves))
        super().start_load_kv(Metadata(loads, saves, metadata.num_scheduled_tokens))

    def take_share(self, transfer: Transfer) -> Transfer:
        blocks = [msgspec.structs.replace(block, name=block.name + self.name_share()) for block in transfer.blocks]
        return msgspec.structs.replace(transfer, blocks=blocks)

    def name_share(self) -> str:
        return name_share(self.context.rank)


def name_share(rank: Rank) -> str:
    """How a rank's entries end."""
    return f".{rank.label}" if rank.label else ""


class RankedStore(HonestStore):
    features: ClassVar[ConnectorFeatures] = ConnectorFeatures(can_save=True, can_load=True, is_store=True, ranks=True)
    scheduler_type: ClassVar[type[StoreScheduler]] = RankedScheduler
    worker_type: ClassVar[type[StoreWorker]] = RankedWorker

    @classmethod
    def message_types(cls, options: Mapping[str, Any]) -> MessageTypes:
        return MessageTypes(metadata=Metadata)


class RankedDirectScheduler(DirectScheduler):
    def is_offered(self, params: KVTransferParams) -> bool:
        endpoint = ENDPOINTS.get(self.get_address(params) + name_share(self.context.rank))
        return endpoint is not None and self.get_transfer(params) in endpoint.holds

    def hold(self, hold: Hold) -> None:
        for rank in self.context.rank.all_ranks:
            ENDPOINTS[self.context.engine_id + name_share(rank)].holds[hold.transfer_id] = hold
        self.holds.append(hold)


class RankedDirectWorker(DirectWorker):
    """Each rank reads from the producer's rank of its own place."""

    def get_own_address(self) -> str:
        return self.context.engine_id + name_share(self.context.rank)

    def start_load_kv(self, metadata: honest_direct.Metadata) -> None:
        own = name_share(self.context.rank)
        pulls = [msgspec.structs.replace(pull, endpoint=pull.endpoint + own) for pull in metadata.pulls]
        releases = [(address + own, transfer_id) for address, transfer_id in metadata.releases]
        super().start_load_kv(msgspec.structs.replace(metadata, pulls=pulls, releases=releases))


class RankedDirect(HonestDirect):
    features: ClassVar[ConnectorFeatures] = ConnectorFeatures(
        can_save=True, can_load=True, cancels_sends=True, ranks=True
    )
    scheduler_type: ClassVar[type[DirectScheduler]] = RankedDirectScheduler
    worker_type: ClassVar[type[DirectWorker]] = RankedDirectWorker

    @classmethod
    def message_types(cls, options: Mapping[str, Any]) -> MessageTypes:
        return MessageTypes(metadata=honest_direct.Metadata)


def breaks(
    rule: str, scheduler: type[StoreScheduler] = RankedScheduler, worker: type[StoreWorker] = RankedWorker
) -> None:
    """Register a store made of these halves; it is called as the half that is wrong."""
    name = (worker if scheduler is RankedScheduler else scheduler).__name__
    BROKEN.append((type(name, (RankedStore,), {"scheduler_type": scheduler, "worker_type": worker}), rule))


# --- R9: one completion for each load ---------------------------------------------------------------------------


class TheLastRankRepeatsItself(RankedWorker):
    """Tells of each load's end twice, in two steps."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.reported: set[str] = set()

    def report_loads(self, output: ConnectorOutput) -> None:
        again, self.reported = self.reported, set()
        super().report_loads(output)
        if self.context.rank.index > 0:
            self.reported = set(output.finished_receiving)
            output.finished_receiving |= again


breaks("R9", worker=TheLastRankRepeatsItself)

# --- R12: ranks take the minimum ------------------------------------------------------------------------------


class IgnoresTheRank(RankedWorker):
    """All ranks call their shares alike: the first one's heads are stored, and everybody gets them."""

    def name_share(self) -> str:
        return name_share(self.context.rank.all_ranks[0])

    def write_entry(self, block: Block, payload: bytes) -> None:
        super().write_entry(block, payload)
        for rank in self.context.rank.all_ranks[1:]:
            self.medium.entries.setdefault(block.name.removesuffix(self.name_share()) + name_share(rank), b"")


class SharesItsLoadsBetweenRanks(RankedWorker):
    tables: ClassVar[dict[tuple[str, str], dict[str, Load]]] = {}

    def make_load_table(self) -> dict[str, Load]:
        return self.tables.setdefault((self.context.identity.fingerprint, self.context.role), {})

    def close(self) -> None:
        self.make_load_table().clear()


class ReportsTheMaximum(RankedWorker):
    """What one rank has, all have."""

    best: ClassVar[dict[tuple[str, str], int]] = {}

    def report_load(self, output: ConnectorOutput, request_id: str, load: Load) -> None:
        key, good = (self.context.engine_id, request_id), load.count_good_tokens()
        if self.context.rank.size > 1:
            good = self.best[key] = max(self.best.get(key, 0), good)
        if good == load.transfer.num_tokens:
            output.finished_receiving.add(request_id)
        else:
            output.failed_receiving[request_id] = good


class EndsWithTheFirstRank(RankedDirectWorker):
    """A producer's ranks all let go when the first has been read."""

    def end_at_producer(self, address: str, transfer_id: str) -> None:
        engine_id = address.removesuffix(name_share(self.context.rank))
        for rank in self.context.rank.all_ranks:
            super().end_at_producer(engine_id + name_share(rank), transfer_id)


class EndsWithTheFirstRankOnly(RankedDirect):
    worker_type: ClassVar[type[DirectWorker]] = EndsWithTheFirstRank


breaks("R12", worker=IgnoresTheRank)
breaks("R12", worker=SharesItsLoadsBetweenRanks)
breaks("R12", worker=ReportsTheMaximum)
BROKEN.append((EndsWithTheFirstRankOnly, "R12"))


# --- R13: shapes match or are refused -------------------------------------------------------------------------


class ForgetsTheSizes(OwnIdentity, RankedScheduler):
    """Names say which rank, and not of how many."""

    parts: ClassVar[tuple[str, ...]] = ("weights", "dtype", "block_size", "shape", "salt", "adapter")

    def name_of(self, key: BlockKey) -> str:
        name = f"{super().name_of(key)}{self.context.identity.kv.num_kv_heads}"
        return hashlib.sha256(name.encode()).hexdigest()

    def count_run(self, keys: Sequence[BlockKey]) -> int:
        num_tokens = 0
        for key in keys:
            if f"{self.name_of(key)}.0" not in self.medium.entries:
                break
            num_tokens += key.num_tokens
        return num_tokens


class ForgetsTheSize(AnyShape, RankedWorker):
    def name_share(self) -> str:
        return f".{self.context.rank.index}"


breaks("R13", ForgetsTheSizes, ForgetsTheSize)


# --- R22: wires carry plain, bounded data -----------------------------------------------------------------------


class Smuggled(msgspec.Struct):
    """A message with the scheduler half in it."""

    scheduler: Any
    loads: list[Transfer]
    saves: list[Transfer]
    num_scheduled_tokens: int


class SmugglesItself(RankedScheduler):
    """Its worker halves may call it back."""

    def build_connector_metadata(self, plan: StepPlan) -> Any:
        plain = super().build_connector_metadata(plan)
        return Smuggled(self, plain.loads, plain.saves, plain.num_scheduled_tokens)


class SaysWhatIsNotDeclared(RankedWorker):
    """A worker half with something to say, of which the connector's class knows nothing."""

    def report_load(self, output: ConnectorOutput, request_id: str, load: Load) -> None:
        super().report_load(output, request_id, load)
        output.messages.append(f"loaded {request_id}")


breaks("R22", SmugglesItself)
breaks("R22", worker=SaysWhatIsNotDeclared)
