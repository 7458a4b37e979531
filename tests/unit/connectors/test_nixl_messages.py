"""Options, descriptors, references and wire messages: plain values in, plain values out."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest

pytest.importorskip("nixl")

from pdserve.connectors.base import KVTransferParams
from pdserve.connectors.nixl import NixlConnector, wire
from pdserve.connectors.nixl.descriptors import (
    DRAM,
    VRAM,
    MemoryRegion,
    build_descriptors,
    build_indices,
    build_registration,
)
from pdserve.connectors.nixl.messages import Endpoint, Offer, build_params, read_params
from pdserve.connectors.nixl.options import NixlOptions, parse_options
from pdserve.connectors.testing import build_context
from pdserve.errors import ConfigError
from pdserve.protocol import Role

OFFER = Offer("r1", "g#0-n", 33, b"digest", [7, 3, 9])
ENDPOINT = Endpoint("tcp://127.0.0.1:4000", "g")


def parse(**options: object) -> NixlOptions:
    return parse_options(build_context(Role.PREFILL, options))


def test_defaults_stay_on_the_loopback_device() -> None:
    options = parse()
    assert options == NixlOptions()
    assert (options.bind_address, options.ucx_devices) == ("tcp://127.0.0.1:*", "lo")


def test_options_as_the_command_line_and_a_file_give_them() -> None:
    text = parse(host="10.0.0.5", port="4711", allowed_peers="10.0.0.5/24, 10.9.9.9", lease_s="2.5")
    values = parse(host="10.0.0.5", port=4711, allowed_peers=["10.0.0.0/24", "10.9.9.9/32"], lease_s=2.5)
    assert text == values
    assert (text.bind_address, text.ucx_devices, text.lease_s) == ("tcp://10.0.0.5:4711", None, 2.5)
    assert parse(host="::1", net_devices="eth0,mlx5_0:1").bind_address == "tcp://[::1]:*"
    assert parse(net_devices="eth0").ucx_devices == "eth0"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hots": "x"}, "option 'hots' is unknown"),
        ({"host": "my-machine"}, "host='my-machine'"),
        ({"host": "0.0.0.0"}, "at which other machines reach this one"),
        ({"host": "10.0.0.5"}, "allowed_peers=10.0.0.5/24"),
        ({"port": 70000}, "port=70000"),
        ({"port": True}, "port=True"),
        ({"allowed_peers": "everybody"}, "allowed_peers='everybody'"),
        ({"allowed_peers": []}, "at least one"),
        ({"allowed_peers": 7}, "separated by commas"),
        ({"lease_s": 0}, "more than 0"),
        ({"answer_timeout_s": "soon"}, "answer_timeout_s='soon'"),
        ({"curve_peer_keys": "/none"}, "connector nixl: option curve_secret_key and connector nixl: option"),
        ({"curve_secret_key": "/none", "curve_peer_keys": "/none"}, "curve_secret_key /none: No such file"),
    ],
)
def test_wrong_options_are_refused_by_both_halves(options: dict[str, object], message: str) -> None:
    context = build_context(Role.PREFILL, options)
    for build in (NixlConnector.build_scheduler, NixlConnector.build_worker):
        with pytest.raises(ConfigError) as caught:
            build(context)
        assert message in str(caught.value)


def test_one_descriptor_a_block() -> None:
    region = MemoryRegion(address=0x7F00_0000_0000, num_blocks=3, block_bytes=368_640)
    expected = [[0x7F00_0000_0000 + index * 368_640, 368_640, 0] for index in range(3)]
    descriptors = build_descriptors(region)
    assert descriptors.dtype == np.uint64
    assert descriptors.tolist() == expected
    assert build_registration(region) == [(0x7F00_0000_0000, 3 * 368_640, 0, "")]


def test_descriptors_of_device_memory_beyond_four_gigabytes() -> None:
    region = MemoryRegion(address=0xFFFF_0000_0000_0000, num_blocks=40_000, block_bytes=1 << 20, memory=VRAM, device=5)
    last = build_descriptors(region)[-1]
    assert [int(value) for value in last] == [0xFFFF_0000_0000_0000 + (39_999 << 20), 1 << 20, 5]
    assert build_registration(region) == [(0xFFFF_0000_0000_0000, 40_000 << 20, 5, "")]
    assert region.memory != DRAM


def test_indices() -> None:
    indices = build_indices([5, 0, 2_000_000_000])
    assert (indices.dtype, indices.tolist()) == (np.int32, [5, 0, 2_000_000_000])


def test_a_reference_survives_the_way_through_the_router() -> None:
    params = build_params([ENDPOINT], OFFER, lease_s=60.0, num_bytes=3 * 4096)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=KVTransferParams)
    reference = read_params(sent)
    assert reference is not None
    assert (reference.transfer_id, reference.generation, reference.address) == ("g#0-n", "g", ENDPOINT.address)
    assert (reference.block_ids, reference.lease_s) == ([7, 3, 9], 60.0)
    assert (params.num_tokens, params.num_bytes) == (33, 12288)


def test_a_reference_names_every_ranks_counterpart() -> None:
    others = [Endpoint("tcp://127.0.0.1:4001", "h"), Endpoint("tcp://127.0.0.1:4002", "i")]
    params = build_params([ENDPOINT, *others], OFFER, lease_s=60.0, num_bytes=0)
    reference = read_params(msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=KVTransferParams))
    assert reference is not None
    ranks = [reference.in_rank(rank) for rank in range(4)]
    assert [own.producer for own in ranks] == [ENDPOINT, *others, others[-1]]
    assert [own.transfer_id for own in ranks] == ["g#0-n", "h#0-n", "i#0-n", "i#0-n"]
    assert [OFFER.in_rank(own.generation).transfer_id for own in ranks] == [own.transfer_id for own in ranks]


def test_ranks_listen_side_by_side() -> None:
    context = build_context(Role.PREFILL, {"port": 4000}, parallel=(2, 1))
    ranks = [dataclasses.replace(context, rank=rank) for rank in context.rank.all_ranks]
    assert [parse_options(rank).port for rank in ranks] == [4000, 4001]
    assert parse_options(dataclasses.replace(ranks[1], options={})).port == 0
    with pytest.raises(ConfigError, match="port=65535 leaves no ports for 2 ranks"):
        parse_options(dataclasses.replace(ranks[0], options={"port": 65535}))


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"address": 7, "lease_s": 1.0, "block_ids": []},
        {"address": "tcp://127.0.0.1:1", "lease_s": 1.0, "block_ids": "all"},
        {"address": "tcp://127.0.0.1:1", "lease_s": 1.0, "block_ids": [1.5]},
        {"address": "tcp://127.0.0.1:1", "lease_s": 1.0, "block_ids": [], "more": 1},
        {"address": "tcp://127.0.0.1:1", "lease_s": 0.0, "block_ids": []},
        {"address": "tcp://127.0.0.1:1", "lease_s": -1.0, "block_ids": []},
    ],
)
def test_parameters_that_make_no_sense_are_no_reference(payload: dict[str, object]) -> None:
    assert read_params(KVTransferParams(connector="nixl", transfer_id="t", engine_id="g", payload=payload)) is None


def test_parameters_of_others_are_no_reference() -> None:
    assert read_params(None) is None
    assert read_params(KVTransferParams(connector="shared_storage", transfer_id="t")) is None


def test_wire_messages_come_back_as_they_went() -> None:
    identity = build_context(Role.DECODE, {}).identity
    region = MemoryRegion(1 << 40, 4, 256)
    for message in (
        wire.Hello(identity),
        wire.Open("t", b"d", is_one_sided=True),
        wire.Extend(["t"]),
        wire.Close("t", 3),
        wire.Cancel("t"),
    ):
        assert wire.decode_consumer_message(wire.encode(message)) == message
    for answer in (
        wire.Welcome("g", identity, b"agent", region),
        wire.Opened("t", 60.0, b"sums"),
        wire.Refused("", "k", "r"),
    ):
        assert wire.decode_producer_message(wire.encode(answer)) == answer


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x80", msgspec.msgpack.encode({"type": "open", "transfer_id": 7})])
def test_what_is_no_message_is_refused(frame: bytes) -> None:
    for decode in (wire.decode_consumer_message, wire.decode_producer_message):
        with pytest.raises(msgspec.DecodeError):
            decode(frame)


def test_a_consumers_message_is_no_producers() -> None:
    with pytest.raises(msgspec.ValidationError):
        wire.decode_producer_message(wire.encode(wire.Cancel("t")))
