"""What the composition's two halves say to each other: downwards each step, upwards what children say."""

from __future__ import annotations

from collections.abc import Sequence
from types import GenericAlias
from typing import Any, Generic, TypeVar

import msgspec

from pdserve.connectors.messages import MessageTypes


class OwnedLoad(msgspec.Struct, frozen=True, array_like=True):
    """An asynchronous load that begins in this step, and the child that will report its end."""

    request_id: str
    child: int


class OwedSend(msgspec.Struct, frozen=True, array_like=True):
    """A request that ended before this step, and the children that will report its sending.

    Attributes:
        request_id: the request.
        children: who will report.
        is_awaited: the engine waits for a report of the composition.
    """

    request_id: str
    children: tuple[int, ...]
    is_awaited: bool


class ChildSent(msgspec.Struct, frozen=True, array_like=True):
    """One child's own end of a sending, whatever the others do and whether or not the engine waits.

    Attributes:
        child: whose.
        request_id: the request.
        is_saved: the child saved it whole.
        num_bytes: that it sent.
    """

    child: int
    request_id: str
    is_saved: bool
    num_bytes: int


Parts = TypeVar("Parts")


class MultiMetadata(msgspec.Struct, Generic[Parts], frozen=True):
    """One step's message.

    Attributes:
        parts: each child's own message: a tuple in order of the children.
        loads: who runs what.
        sends: who will report what.
    """

    parts: Parts
    loads: list[OwnedLoad] = []
    sends: list[OwedSend] = []


Said = TypeVar("Said")


class MultiReport(msgspec.Struct, Generic[Said], frozen=True):
    """What one rank's children say to their scheduler halves after a step.

    Attributes:
        rank: its index.
        said: each child's own messages: a tuple of lists in order of the children.
        sent: sendings that ended.
    """

    rank: int
    said: Said
    sent: list[ChildSent]


def compose_types(children: Sequence[MessageTypes]) -> MessageTypes:
    """What the composition's halves say when its children's say this."""
    metadata: Any = MultiMetadata
    report: Any = MultiReport
    parts = GenericAlias(tuple, tuple(types.metadata for types in children))
    said = GenericAlias(tuple, tuple(GenericAlias(list, (types.report,)) for types in children))
    return MessageTypes(metadata=metadata[parts], report=report[said])
