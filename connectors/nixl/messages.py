"""What the two halves of one engine say to each other, and what a producer's engine tells a consumer's.

Downwards (`StepMetadata`) once a step, the same to all ranks; upwards (`Listening`) once in a worker's life.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from pdserve.connectors.nixl.leases import translate_transfer_id
from pdserve.connectors.nixl.options import CONNECTOR_NAME
from pdserve.protocol import KVTransferParams

_EXTENSIONS_A_LEASE = 4


class Endpoint(msgspec.Struct, frozen=True):
    """A producer's worker half, as others reach it.

    Attributes:
        address: of the side channel.
        generation: names this incarnation of the producer; never the same again.
    """

    address: str
    generation: str


class Listening(msgspec.Struct, frozen=True):
    """A worker half is there.

    Attributes:
        rank: its place among the engine's.
        endpoint: where.
    """

    rank: int
    endpoint: Endpoint


class TransferReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a consumer needs to fetch a request's KV; made by the producer, carried by the router.

    Nothing in it is believed: the producer knows transfers by their ids, and its checksums are of the blocks that it
    holds for this transfer, so a wrong reference reads bytes that are then thrown away.

    Attributes:
        transfer_id: under which the producer's first rank knows it.
        generation: that rank's incarnation.
        address: of that rank's side channel.
        lease_s: how long a rank waits for a sign of life.
        block_ids: the prompt's blocks there, in order, the same in all ranks.
        more_ranks: the producer's other ranks, in order.
    """

    transfer_id: str
    generation: str
    address: str
    lease_s: Annotated[float, msgspec.Meta(gt=0)]
    block_ids: list[int]
    more_ranks: list[Endpoint] = []

    @property
    def producer(self) -> Endpoint:
        """Its first rank; in a reference `in_rank`, that one."""
        return Endpoint(self.address, self.generation)

    def in_rank(self, rank: int) -> TransferReference:
        """The reference to one rank's share.

        Where the producer has fewer ranks, to its last one's: that one's greeting says what differs.
        """
        if rank == 0 or not self.more_ranks:
            return self
        endpoint = self.more_ranks[min(rank, len(self.more_ranks)) - 1]
        transfer_id = translate_transfer_id(self.transfer_id, endpoint.generation)
        return TransferReference(transfer_id, endpoint.generation, endpoint.address, self.lease_s, self.block_ids)

    @property
    def extension_interval_s(self) -> float:
        """How often the producer is to get a sign of life."""
        return self.lease_s / _EXTENSIONS_A_LEASE


class Offer(msgspec.Struct, frozen=True):
    """A finished request's blocks wait for a consumer.

    Attributes:
        request_id: whose.
        transfer_id: under which a consumer asks the first rank for them.
        num_tokens: of the prompt.
        digest: identity of the prompt: the key of its last block.
        block_ids: the prompt's blocks, in order.
    """

    request_id: str
    transfer_id: str
    num_tokens: int
    digest: bytes
    block_ids: list[int]

    def in_rank(self, generation: str) -> Offer:
        """The offer of the rank of that incarnation."""
        transfer_id = translate_transfer_id(self.transfer_id, generation)
        return msgspec.structs.replace(self, transfer_id=transfer_id)


class FilledBlocks(msgspec.Struct, frozen=True):
    """Blocks of a prompt whose rest is still being computed, and that will probably be offered with it.

    Attributes:
        request_id: whose.
        first_block: index of the first one in the prompt; those before it were told of earlier.
        block_ids: full ones, in order.
    """

    request_id: str
    first_block: int
    block_ids: list[int]


class Load(msgspec.Struct, frozen=True):
    """Fill blocks of one request.

    Attributes:
        request_id: whose.
        reference: where the KV is.
        digest: identity of the whole prompt: the key of its last block.
        num_prompt_tokens: of the whole prompt.
        first_block: the first one to load; those before it are here already.
        num_tokens: tokens that the engine counts on, from the first of ``first_block`` on.
        block_ids: where they go, in order.
    """

    request_id: str
    reference: TransferReference
    digest: bytes
    num_prompt_tokens: int
    first_block: int
    num_tokens: int
    block_ids: list[int]

    def in_rank(self, rank: int) -> Load:
        """One rank's share of it."""
        return msgspec.structs.replace(self, reference=self.reference.in_rank(rank))


class StepMetadata(msgspec.Struct, frozen=True):
    """One step's message.

    Attributes:
        filled: blocks that earlier steps have filled.
        forgotten: requests whose filled blocks will not be offered after all.
        offers: blocks to hold and to hand out.
        loads: to begin.
        releases: transfers whose KV is not needed any more, and was not asked for.
        cancelled_loads: requests that ended while their load is under way.
        cancelled_offers: requests whose consumer will not come.
        queued: transfers that will be asked for when their requests' turn comes.
        computes: the step has tokens to compute.
    """

    filled: list[FilledBlocks] = []
    forgotten: list[str] = []
    offers: list[Offer] = []
    loads: list[Load] = []
    releases: list[TransferReference] = []
    cancelled_loads: list[str] = []
    cancelled_offers: list[str] = []
    queued: list[TransferReference] = []
    computes: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do for the transfer thread."""
        return not any(getattr(self, name) for name in self.__struct_fields__ if name != "computes")


def build_params(ranks: Sequence[Endpoint], offer: Offer, *, lease_s: float, num_bytes: int) -> KVTransferParams:
    """What goes to the consumer through the router.

    Args:
        ranks: of this engine, in order.
        offer: whose blocks are held.
        lease_s: how long each rank waits.
        num_bytes: of all ranks.
    """
    first, *others = ranks
    payload = {"address": first.address, "lease_s": lease_s, "block_ids": offer.block_ids}
    if others:
        payload["more_ranks"] = msgspec.to_builtins(others)
    return KVTransferParams(
        connector=CONNECTOR_NAME,
        transfer_id=offer.transfer_id,
        engine_id=first.generation,
        num_tokens=offer.num_tokens,
        num_bytes=num_bytes,
        payload=payload,
    )


def read_params(params: KVTransferParams | None) -> TransferReference | None:
    """The reference in a request's parameters; None when they are another connector's, or make no sense."""
    if params is None or params.connector != CONNECTOR_NAME:
        return None
    values = {**params.payload, "transfer_id": params.transfer_id, "generation": params.engine_id}
    try:
        return msgspec.convert(values, TransferReference)
    except msgspec.ValidationError:
        return None
