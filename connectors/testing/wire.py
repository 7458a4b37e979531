"""The way between a connector's halves, as in an engine of several processes: every message is bytes for a moment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from pdserve.connectors.base import ConnectorMetadata, ConnectorOutput
from pdserve.connectors.messages import MessageCodec, MessageTypes
from pdserve.connectors.testing.violations import RuleViolationError


class Wire:
    """Carries messages between the halves.

    Args:
        types: as the connector declares them; None = it serves one rank only, and its halves share a process.
    """

    def __init__(self, types: MessageTypes | None) -> None:
        self._codec = None if types is None else MessageCodec(types)

    def carry_metadata(self, metadata: ConnectorMetadata) -> ConnectorMetadata:
        """What a worker half gets.

        Raises:
            RuleViolationError: it is no plain data, or not of the declared type.
        """
        if self._codec is None:
            return metadata
        with _refusing("the step's message"):
            return self._codec.decode_metadata(self._codec.encode_metadata(metadata))

    def carry_output(self, output: ConnectorOutput) -> ConnectorOutput:
        """What the scheduler half gets of a worker half's report.

        Raises:
            RuleViolationError: it is no plain data, or its messages are not of the declared type.
        """
        if self._codec is None:
            return output
        with _refusing("a worker half's report"):
            return self._codec.decode_output(self._codec.encode_output(output))


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    try:
        yield
    except (TypeError, OverflowError, msgspec.MsgspecError) as error:
        raise RuleViolationError("R22", f"{what} cannot leave the process: {error}") from error
