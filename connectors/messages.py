"""What a connector's halves say to each other, as bytes: in an engine of several ranks they live in several processes.

In one process the halves hand each other objects, and nothing here is called. The conformance kit sends every message
of a connector that serves ranks this way, so that one that passes there can be taken apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import msgspec

from pdserve.connectors.base import ConnectorMetadata, ConnectorOutput


@dataclass(frozen=True, slots=True)
class MessageTypes:
    """What is decoded at the other end; any type that msgspec takes, of plain data.

    Attributes:
        metadata: what `build_connector_metadata` returns.
        report: each of `ConnectorOutput.messages`; None = the worker halves say nothing of their own.
    """

    metadata: Any = None
    report: Any = None


@runtime_checkable
class ServesRanks(Protocol):
    """A connector's class, with `ConnectorFeatures.ranks`: one scheduler half, and a worker half for each rank.

    Each worker half gets every message, moves its rank's share of each block and reports for itself; the engine makes
    one report of all (see `OutputAggregator`). `ConnectorOutput.messages` of all ranks arrive in the order of ranks:
    a half that has to be told from the others says which it is.
    """

    @classmethod
    def message_types(cls, options: Mapping[str, Any]) -> MessageTypes:
        """What the halves say to each other when they are built with these options."""
        ...


class MessageCodec:
    """Messages of one connector to bytes (msgpack) and back.

    Args:
        types: as its class declares them.
    """

    def __init__(self, types: MessageTypes) -> None:
        self._report_type = types.report
        self._encoder = msgspec.msgpack.Encoder()
        self._metadata_decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(types.metadata)
        self._output_decoder = msgspec.msgpack.Decoder(ConnectorOutput)

    def encode_metadata(self, metadata: ConnectorMetadata) -> bytes:
        """A step's message to the worker halves.

        Raises:
            TypeError: it holds something that is no plain data.
        """
        return self._encoder.encode(metadata)

    def decode_metadata(self, data: bytes) -> ConnectorMetadata:
        """A step's message, as the scheduler half built it.

        Raises:
            msgspec.ValidationError: it is not of the declared type.
        """
        return self._metadata_decoder.decode(data)

    def encode_output(self, output: ConnectorOutput) -> bytes:
        """A worker half's report.

        Raises:
            TypeError: one of its messages holds something that is no plain data.
        """
        return self._encoder.encode(output)

    def decode_output(self, data: bytes) -> ConnectorOutput:
        """A report, as the worker half made it.

        Raises:
            msgspec.ValidationError: one of its messages is not of the declared type.
        """
        output = self._output_decoder.decode(data)
        output.messages = [msgspec.convert(message, self._report_type) for message in output.messages]
        return output
