"""Messages of the side channel between a consumer and a producer: msgpack, typed, bounded.

::

    consumer                                producer
      Hello(identity) ─────────────────────>   once for each connection
      <── Welcome(rank, agent, memory) or Refused
      Extend(transfers) ───────────────────>   now and then, from the moment a request is queued
      Open(transfer, digest) ──────────────>   the transfer is this consumer's; its lease begins anew
        reads the blocks meanwhile
      <─ Opened(lease, checksums) or Refused   as soon as the checksums are known
      Open(transfer, digest) ──────────────>   again and again while it reads
      <─ Opened(lease, checksums) or Refused
      Close(transfer) ─────────────────────>   it has read them all; not answered
      Cancel(transfer) ────────────────────>   instead of Open or Close: the blocks are free

The producer frees the blocks when it gets Close or Cancel, or when the lease ends, and tells a reader that it lost its
lease. A transfer costs one round trip, beside the read: what a consumer reads before it knows whether it may is worth
nothing until Opened comes.
"""

from __future__ import annotations

import msgspec

from pdserve.connectors.nixl.descriptors import MemoryRegion
from pdserve.kv_layout import ModelIdentity
from pdserve.protocol import decode_frame

WIRE_VERSION = 3
MAX_FRAME_BYTES = 4 * 1024 * 1024
"""Checksums of a prompt of some eight million tokens."""


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A consumer introduces itself."""

    identity: ModelIdentity
    version: int = WIRE_VERSION


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Take a transfer, or keep it.

    Attributes:
        transfer_id: which.
        digest: identity of the prompt that the consumer wants.
        is_one_sided: the consumer's reads need nothing from the producer's side; over a network they do, and the first.
        serial: number of the question among the consumer's about this transfer.
    """

    transfer_id: str
    digest: bytes
    is_one_sided: bool = False
    serial: int = 0


class Extend(msgspec.Struct, frozen=True, tag="extend"):
    """These transfers will be opened."""

    transfer_ids: list[str]


class Close(msgspec.Struct, frozen=True, tag="close"):
    """The blocks have been read, ``num_blocks`` of them, and are free."""

    transfer_id: str
    num_blocks: int


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """The transfer is not needed. Not answered; what is unknown is ignored."""

    transfer_id: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Answers Hello.

    Attributes:
        generation: this incarnation of the producer.
        identity: its model.
        agent: what NIXL needs to connect.
        memory: where its blocks lie.
        rank: whose share of each block that is, by its place among the producer's ranks.
    """

    generation: str
    identity: ModelIdentity
    agent: bytes
    memory: MemoryRegion
    rank: int = 0


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """Answers Open: the lease is the consumer's.

    Attributes:
        transfer_id: which.
        lease_s: for how long, from when Open was received.
        checksums: xxh3_64 of each of the prompt's blocks, little-endian, one after the other.
        serial: of the question: an answer that comes twice does not lengthen a lease that a later question was about.
    """

    transfer_id: str
    lease_s: float
    checksums: bytes
    serial: int = 0


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Hello (then ``transfer_id`` is empty) or Open cannot be granted, or the lease has ended.

    Attributes:
        transfer_id: which.
        kind: under which the consumer counts it.
        reason: for people.
    """

    transfer_id: str
    kind: str
    reason: str


ConsumerMessage = Hello | Open | Extend | Close | Cancel
ProducerMessage = Welcome | Opened | Refused

_encoder = msgspec.msgpack.Encoder()
_consumer_message_decoder = msgspec.msgpack.Decoder(ConsumerMessage)
_producer_message_decoder = msgspec.msgpack.Decoder(ProducerMessage)


def encode(message: ConsumerMessage | ProducerMessage) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def decode_consumer_message(frame: bytes) -> ConsumerMessage:
    """Decode what a consumer sent.

    Raises:
        msgspec.DecodeError: not a message of this protocol.
    """
    return decode_frame(_consumer_message_decoder, frame)


def decode_producer_message(frame: bytes) -> ProducerMessage:
    """Decode what a producer sent.

    Raises:
        msgspec.DecodeError: not a message of this protocol.
    """
    return decode_frame(_producer_message_decoder, frame)
