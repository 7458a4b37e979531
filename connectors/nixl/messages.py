"""What the two halves of one engine say to each other, and what a producer's engine tells a consumer's.

Downwards (`StepMetadata`) once a step; upwards (`Endpoint`) once in the worker's life.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

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


class TransferReference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a consumer needs to fetch a request's KV; made by the producer, carried by the router.

    Nothing in it is believed: the producer knows transfers by their ids, and its checksums are of the blocks that it
    holds for this transfer, so a wrong reference reads bytes that are then thrown away.

    Attributes:
        transfer_id: under which the producer knows it.
        generation: the incarnation of the producer.
        address: of its side channel.
        lease_s: how long it waits for a sign of life.
        block_ids: the prompt's blocks there, in order.
    """

    transfer_id: str
    generation: str
    address: str
    lease_s: Annotated[float, msgspec.Meta(gt=0)]
    block_ids: list[int]

    @property
    def producer(self) -> Endpoint:
        """Who made it."""
        return Endpoint(self.address, self.generation)

    @property
    def extension_interval_s(self) -> float:
        """How often the producer is to get a sign of life."""
        return self.lease_s / _EXTENSIONS_A_LEASE


class Offer(msgspec.Struct, frozen=True):
    """A finished request's blocks wait for a consumer.

    Attributes:
        request_id: whose.
        transfer_id: under which a consumer asks for them.
        num_tokens: of the prompt.
        digest: identity of the prompt: the key of its last block.
        block_ids: the prompt's blocks, in order.
    """

    request_id: str
    transfer_id: str
    num_tokens: int
    digest: bytes
    block_ids: list[int]


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
    """

    filled: list[FilledBlocks] = []
    forgotten: list[str] = []
    offers: list[Offer] = []
    loads: list[Load] = []
    releases: list[TransferReference] = []
    cancelled_loads: list[str] = []
    cancelled_offers: list[str] = []
    queued: list[TransferReference] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not any(getattr(self, name) for name in self.__struct_fields__)


def build_params(endpoint: Endpoint, offer: Offer, *, lease_s: float, num_bytes: int) -> KVTransferParams:
    """What goes to the consumer through the router."""
    return KVTransferParams(
        connector=CONNECTOR_NAME,
        transfer_id=offer.transfer_id,
        engine_id=endpoint.generation,
        num_tokens=offer.num_tokens,
        num_bytes=num_bytes,
        payload={"address": endpoint.address, "lease_s": lease_s, "block_ids": offer.block_ids},
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
