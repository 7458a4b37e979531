"""NIXL: engines that reach each other over loopback; nothing to start.

Damage is done at the seams of the consumer's reads and the producer's socket.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

from pdserve.connectors.base import KVConnector
from pdserve.connectors.nixl import wire
from pdserve.connectors.nixl.loads import ActiveLoad
from pdserve.connectors.nixl.reads import ReadQueue
from pdserve.connectors.nixl.side_channel import ProducerSocket
from pdserve.connectors.testing.faults.link import Damage
from pdserve.connectors.testing.target import ConformanceTarget
from pdserve.connectors.testing.violations import NotOfferedError

_OPTIONS = {"answer_timeout_s": 3.0}
_PAUSE_S = 0.001


class Target(ConformanceTarget):
    """The connector with short waits, and a lease that the checks may shorten."""

    lease_option: ClassVar[str | None] = "lease_s"

    def __init__(self, connector: type[KVConnector], options: Mapping[str, Any], directory: Path) -> None:
        super().__init__(connector, {**_OPTIONS, **options}, directory)

    @contextlib.contextmanager
    def outage(self) -> Iterator[None]:
        """Producers are deaf; what was said to them meanwhile reaches them afterwards."""

        def receive(socket: ProducerSocket) -> Iterator[None]:
            time.sleep(_PAUSE_S)
            return iter(())

        with mock.patch.object(ProducerSocket, "receive", receive):
            yield

    @contextlib.contextmanager
    def held_loads(self) -> Iterator[None]:
        """No piece of any load arrives."""

        def advance(queue: ReadQueue) -> bool:
            time.sleep(_PAUSE_S)
            return False

        with mock.patch.object(ReadQueue, "advance", advance):
            yield

    def other_version(self) -> AbstractContextManager[object]:
        """Producers expect the next version of the greeting."""
        return mock.patch.object(wire, "WIRE_VERSION", wire.WIRE_VERSION + 1)

    @contextlib.contextmanager
    def bad_link(self, damage: Damage) -> Iterator[None]:
        """The first byte of every piece arrives with a flipped bit; UCX keeps every other damage from us."""
        if damage is not Damage.FLIP:
            raise NotOfferedError("bytes between NIXL's agents can only be flipped here")
        take_piece = ReadQueue._take_piece

        def take_damaged_piece(queue: ReadQueue, active: ActiveLoad) -> None:
            queue._memory._rows[queue._piece[0], 0] ^= 1
            take_piece(queue, active)

        with mock.patch.object(ReadQueue, "_take_piece", take_damaged_piece):
            yield
