"""What the composition's two halves say to each other: downwards each step, upwards what children say."""

from __future__ import annotations

from typing import Any

import msgspec

from pdserve.connectors.base import ConnectorMetadata


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


class ChildMessage(msgspec.Struct, frozen=True, array_like=True):
    """What one child's worker half says to its scheduler half."""

    child: int
    message: Any


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


class MultiMetadata(msgspec.Struct, frozen=True):
    """One step's message.

    Attributes:
        parts: each child's own message, in order of the children.
        loads: who runs what.
        sends: who will report what.
    """

    parts: list[ConnectorMetadata]
    loads: list[OwnedLoad] = []
    sends: list[OwedSend] = []
