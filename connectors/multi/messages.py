"""What the composition's scheduler half tells its worker halves each step."""

from __future__ import annotations

import msgspec

from pdserve.connectors.base import ConnectorMetadata


class OwnedLoad(msgspec.Struct, frozen=True, array_like=True):
    """A load that begins in this step, and the child that runs it."""

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
