"""What halves say to each other survives the way between two processes, or is refused."""

from __future__ import annotations

import threading

import msgspec
import pytest

from pdserve.connectors import ConnectorFeatures, MessageTypes, Rank, ServesRanks
from pdserve.connectors.base import ConnectorOutput, ConnectorStats
from pdserve.connectors.blocks.messages import BlockTransfer, LoadRequest, SaveRequest, StepMetadata
from pdserve.connectors.memory import MemoryConnector
from pdserve.connectors.messages import MessageCodec
from pdserve.connectors.null import NullConnector
from pdserve.connectors.registry import require_ranks
from pdserve.errors import ConfigError


class Said(msgspec.Struct, frozen=True):
    rank: int
    address: bytes


def test_metadata_arrives_as_it_was_built() -> None:
    blocks = [BlockTransfer(b"\0" * 16, 3, 7)]
    metadata = StepMetadata([LoadRequest("a", 3, blocks)], [SaveRequest("b", blocks)], ["c"])
    codec = MessageCodec(MessageTypes(metadata=StepMetadata))
    assert codec.decode_metadata(codec.encode_metadata(metadata)) == metadata


def test_a_report_arrives_as_it_was_made() -> None:
    output = ConnectorOutput(
        {"a", "b"}, {"a"}, {"c"}, {"d": 16}, {3, 4}, {"c": 5}, {"b": 6}, ConnectorStats(1, 2, 0.5, failures={"io": 1})
    )
    output.parts["x"] = ConnectorStats(7)
    output.messages.append(Said(1, b"\xff"))
    codec = MessageCodec(MessageTypes(report=Said))
    assert codec.decode_output(codec.encode_output(output)) == output


def test_what_is_no_plain_data_is_refused() -> None:
    codec = MessageCodec(MessageTypes())
    with pytest.raises(TypeError):
        codec.encode_metadata(threading.Event())
    with pytest.raises(TypeError):
        codec.encode_output(ConnectorOutput(messages=[threading.Event()]))


def test_what_is_not_of_the_declared_type_is_refused() -> None:
    codec = MessageCodec(MessageTypes(metadata=StepMetadata))
    with pytest.raises(msgspec.ValidationError):
        codec.decode_metadata(codec.encode_metadata([1, 2]))
    with pytest.raises(msgspec.ValidationError):
        codec.decode_output(codec.encode_output(ConnectorOutput(messages=["surprise"])))


# --- who may serve several ranks --------------------------------------------------------------------------------


class OneRankOnly(NullConnector):
    features = ConnectorFeatures()


class Wordless:
    features = ConnectorFeatures(ranks=True)


def test_a_connector_for_one_rank_is_refused_for_several() -> None:
    require_ranks("mine", OneRankOnly, Rank())
    with pytest.raises(ConfigError, match="connector mine serves one rank only, not tensor_parallel_size 3, "):
        require_ranks("mine", OneRankOnly, Rank(0, 3, 0, 2))
    with pytest.raises(ConfigError, match="has no message_types"):
        require_ranks("mine", Wordless, Rank(0, 3))  # type: ignore[arg-type]


@pytest.mark.parametrize("connector", [NullConnector, MemoryConnector])
def test_these_serve_ranks(connector: type[NullConnector]) -> None:
    require_ranks("mine", connector, Rank(1, 2))
    assert isinstance(connector, ServesRanks)
