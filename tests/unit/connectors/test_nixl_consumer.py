"""The consumer's side over a network of the test's own: memory and checksums are real, messages and reads are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("nixl")

from pdserve.connectors.base import ConnectorOutput, ConnectorStats
from pdserve.connectors.blocks.failures import WarningLimiter
from pdserve.connectors.blocks.read_pace import ReadPace
from pdserve.connectors.nixl import wire
from pdserve.connectors.nixl import worker as worker_module
from pdserve.connectors.nixl.agent import RemotePool, TransportError
from pdserve.connectors.nixl.consumer import Consumer
from pdserve.connectors.nixl.descriptors import MemoryRegion
from pdserve.connectors.nixl.messages import Endpoint, Load, TransferReference
from pdserve.connectors.nixl.pool_memory import PoolMemory
from pdserve.connectors.nixl.reads import ReadQueue
from pdserve.connectors.nixl.report import TransferReport
from pdserve.connectors.testing import build_context
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.protocol import Role

CONTEXT = build_context(Role.DECODE, {})
IDENTITY = CONTEXT.identity
PRODUCER = Endpoint("tcp://127.0.0.1:4000", "g")
LEASE_S = 20.0
TIMEOUT_S = 5.0
S = TINY_SPEC.block_size
NUM_TOKENS = 6 * S + 1
THEIRS = [9, 8, 7, 6, 5, 4, 3]  # where the prompt's blocks lie at the producer
OURS = [1, 3, 5, 7, 9, 11, 13]


class Channel:
    def __init__(self) -> None:
        self.sent: list[wire.ConsumerMessage] = []
        self.serials: dict[str, int] = {}
        self.is_closed = False

    def send(self, message: wire.ConsumerMessage) -> None:
        self.sent.append(message)
        if isinstance(message, wire.Open):
            self.serials[message.transfer_id] = message.serial

    def close(self) -> None:
        self.is_closed = True


class Network:
    """Stands where NIXL does: reads copy rows between two pools, at once or when the test says so."""

    def __init__(self, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        self.mine, self.theirs = mine, theirs
        self.is_slow = False
        self.is_down = False
        self.is_connected = False
        self.damaged_block: int | None = None
        self.pending: list[tuple[list[int], list[int]]] = []

    def connect(self, metadata: bytes, region: MemoryRegion) -> RemotePool:
        if metadata != b"agent":
            raise TransportError("transport", "no metadata")
        self.is_connected = True
        self.remote = RemotePool("peer", None)
        return self.remote

    def disconnect(self, remote: RemotePool) -> None:
        self.is_connected = False
        self.pending.clear()

    def start_read(self, local: Sequence[int], remote: RemotePool, there: Sequence[int]) -> Any:
        if self.is_down:
            raise TransportError("disconnected", "gone")
        self.pending.append((list(local), list(there)))
        if self.is_slow:
            return self.pending
        self.arrive()
        return None

    def poll(self, read: Any) -> bool:
        if self.is_down:
            raise TransportError("disconnected", "gone")
        return not self.pending

    def release(self, read: Any) -> None:
        self.pending.clear()

    def arrive(self) -> None:
        local, there = self.pending.pop()
        self.mine[local] = self.theirs[there]
        if self.damaged_block in local:
            self.mine[self.damaged_block, 0, 0, 0, 0, 0] += 1


def build_pool(value: float) -> torch.Tensor:
    pool = torch.full((16, *TINY_SPEC.block_shape), value, dtype=torch.bfloat16)
    pool += torch.arange(16).reshape(16, 1, 1, 1, 1, 1)
    return pool


@dataclass
class Desk:
    """A consumer with everything around it in reach."""

    now: float = 0.0
    channels: dict[Endpoint, Channel] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mine, self.theirs = build_pool(100.0), build_pool(1.0)
        self.theirs[THEIRS[-1], :, :, :, 1:] = 0  # behind the prompt's end
        self.memory, self.their_memory = PoolMemory(self.mine, TINY_SPEC), PoolMemory(self.theirs, TINY_SPEC)
        self.network = Network(self.mine, self.theirs)
        self.report = TransferReport()
        self.consumer = Consumer(
            CONTEXT,
            self.network,  # type: ignore[arg-type]
            self.memory,
            self.report,
            WarningLimiter(worker_module.logger, lambda: self.now),
            open_channel=self._open,
            timeout_s=TIMEOUT_S,
            clock=lambda: self.now,
        )
        # One block a piece: the whole prompt takes seven.
        self.consumer._reads._blocks_in_piece = 1

    def _open(self, producer: Endpoint) -> Channel:
        if "127.0.0.1" not in producer.address:
            raise ValueError(f"{producer.address} is not allowed")
        self.channels[producer] = Channel()
        return self.channels[producer]

    def build_load(self, name: str = "d", first: int = 0, num_tokens: int | None = None, **parts: Any) -> Load:
        end = TINY_SPEC.num_blocks_for(first * S + num_tokens) if num_tokens else len(THEIRS)
        reference = TransferReference(
            **{
                "transfer_id": f"g#0-{name}",
                "generation": PRODUCER.generation,
                "address": PRODUCER.address,
                "lease_s": LEASE_S,
                "block_ids": THEIRS,
                **parts,
            }
        )
        return Load(
            name, reference, b"prompt", NUM_TOKENS, first, num_tokens or NUM_TOKENS - first * S, OURS[first:end]
        )

    @property
    def sent(self) -> list[wire.ConsumerMessage]:
        """Messages since the last look."""
        channel = self.channels[PRODUCER]
        sent, channel.sent = channel.sent, []
        return sent

    def welcome(self, **parts: Any) -> None:
        values = {"generation": "g", "identity": IDENTITY, "agent": b"agent", "memory": self.their_memory.region}
        self.consumer.receive(PRODUCER, wire.Welcome(**{**values, **parts}))

    def start(self, load: Load | None = None) -> Load:
        """A load whose producer has said Welcome."""
        load = load or self.build_load()
        self.consumer.start(load)
        if not self.network.is_connected:
            self.welcome()
        return load

    def read_all(self) -> None:
        while self.consumer.wants_to_run:
            self.consumer.advance()

    def grant(self, name: str = "d") -> None:
        """The producer's word that the lease is the consumer's, with its checksums: it answers the last question."""
        self.consumer.receive(PRODUCER, self.build_opened(name))

    def build_opened(self, name: str = "d") -> wire.Opened:
        checksums = self.their_memory.get_checksums(THEIRS).tobytes()
        transfer_id = f"g#0-{name}"
        return wire.Opened(transfer_id, LEASE_S, checksums, self.channels[PRODUCER].serials.get(transfer_id, 0))

    def grant_what_was_asked(self) -> None:
        for message in self.sent:
            if isinstance(message, wire.Open):
                self.grant(message.transfer_id.removeprefix("g#0-"))

    def refuse(self, kind: str, name: str = "d") -> None:
        self.consumer.receive(PRODUCER, wire.Refused(f"g#0-{name}", kind, "because"))

    def take(self) -> ConnectorOutput:
        return self.report.take([])

    def are_wiped(self, blocks: Sequence[int]) -> bool:
        return bool((self.mine[list(blocks)] == 0).all())

    def are_untouched(self, blocks: Sequence[int]) -> bool:
        return bool((self.mine[list(blocks)] == build_pool(100.0)[list(blocks)]).all())


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_whole_load(desk: Desk) -> None:
    desk.consumer.start(desk.build_load())
    assert desk.sent == [wire.Hello(IDENTITY)]
    assert not desk.consumer.wants_to_run
    desk.welcome()
    assert desk.sent == [wire.Open("g#0-d", b"prompt")]
    desk.read_all()
    assert desk.sent == []
    assert desk.take() == ConnectorOutput()
    desk.grant()
    assert desk.sent == [wire.Close("g#0-d", 7)]
    output = desk.take()
    assert (output.finished_receiving, output.failed_receiving) == ({"d"}, {})
    assert output.received_bytes == {"d": 7 * TINY_SPEC.block_bytes}
    assert (output.stats.num_blocks_loaded, output.stats.failures) == (7, {})
    assert torch.equal(desk.mine[OURS], desk.theirs[THEIRS])
    assert desk.consumer.next_due is None


def test_the_second_load_needs_no_greeting(desk: Desk) -> None:
    desk.start()
    desk.start(desk.build_load("e"))
    desk.read_all()
    desk.grant("e")
    desk.grant("d")
    names = [type(message).__name__ for message in desk.sent]
    assert names == ["Hello", "Open", "Open", "Close", "Close"]
    assert desk.take().finished_receiving == {"d", "e"}


def test_only_what_is_missing_is_read(desk: Desk) -> None:
    desk.start(desk.build_load(first=2))
    desk.read_all()
    desk.grant()
    assert desk.take().finished_receiving == {"d"}
    assert desk.are_untouched(OURS[:2])
    assert torch.equal(desk.mine[OURS[2:]], desk.theirs[THEIRS[2:]])


def test_a_load_of_less_than_the_rest(desk: Desk) -> None:
    desk.start(desk.build_load(first=1, num_tokens=2 * S - 1))
    desk.read_all()
    desk.grant()
    assert desk.sent[-1] == wire.Close("g#0-d", 2)
    assert desk.take().finished_receiving == {"d"}
    assert desk.are_untouched([OURS[0], *OURS[3:]])


def test_what_lies_behind_the_prompts_end_is_zeroed_before_it_counts(desk: Desk) -> None:
    """Also when it was read before the producer had zeroed it."""
    checksums = desk.their_memory.get_checksums(THEIRS).tobytes()
    desk.theirs[THEIRS[-1], :, :, :, 1:] = float("nan")
    desk.start()
    desk.read_all()
    desk.consumer.receive(PRODUCER, wire.Opened("g#0-d", LEASE_S, checksums))
    assert desk.take().finished_receiving == {"d"}
    assert (desk.mine[OURS[-1], :, :, :, 1:] == 0).all()


@pytest.mark.parametrize("bad", range(7))
def test_a_wrong_byte_ends_the_good_run(desk: Desk, bad: int) -> None:
    desk.network.damaged_block = OURS[bad]
    desk.start()
    desk.read_all()
    desk.grant()
    output = desk.take()
    assert (output.failed_receiving, output.stats.failures) == ({"d": bad * S}, {"corrupt": 1})
    assert desk.are_wiped([OURS[bad]])
    assert torch.equal(desk.mine[OURS[:bad]], desk.theirs[THEIRS[:bad]])


def test_the_checksum_is_of_the_bytes_that_arrived(desk: Desk) -> None:
    """The producer's block changes after its checksum was taken: NIXL reads that without complaint."""
    checksums = desk.their_memory.get_checksums(THEIRS).tobytes()
    desk.theirs[THEIRS[2], 0, 0, 0, 0, 0] += 1
    desk.start()
    desk.read_all()
    desk.consumer.receive(PRODUCER, wire.Opened("g#0-d", LEASE_S, checksums))
    assert desk.take().failed_receiving == {"d": 2 * S}
    assert desk.are_wiped([OURS[2]])


@pytest.mark.parametrize("checksums", [b"", b"\0" * 8, b"\0" * 55, b"\0" * 64 * 8])
def test_checksums_of_a_wrong_number_verify_nothing(desk: Desk, checksums: bytes) -> None:
    desk.start()
    desk.read_all()
    desk.consumer.receive(PRODUCER, wire.Opened("g#0-d", LEASE_S, checksums))
    assert desk.take().failed_receiving == {"d": 0}
    assert desk.are_wiped(OURS)


@pytest.mark.parametrize("num_pieces", [0, 1, 6, 7])
def test_a_refusal_at_any_moment_ends_the_load_and_wipes_what_came(desk: Desk, num_pieces: int) -> None:
    desk.network.is_slow = True
    desk.start()
    if num_pieces:
        desk.consumer.advance()
    for _ in range(num_pieces - 1):
        desk.network.arrive()
        desk.consumer.advance()
    desk.refuse("expired")
    if num_pieces:
        assert desk.take() == ConnectorOutput()
        desk.network.arrive()
        desk.consumer.advance()
    output = desk.take()
    assert (output.failed_receiving, output.stats.failures) == ({"d": 0}, {"expired": 1})
    assert desk.are_wiped(OURS[:num_pieces])
    assert desk.are_untouched(OURS[num_pieces:])
    assert not any(isinstance(message, wire.Cancel) for message in desk.sent)
    desk.grant()
    desk.refuse("expired")
    desk.consumer.advance()
    assert desk.take() == ConnectorOutput()


def test_a_refusal_when_everything_is_read(desk: Desk) -> None:
    desk.start()
    desk.read_all()
    desk.refuse("expired")
    assert desk.take().failed_receiving == {"d": 0}
    assert desk.are_wiped(OURS)


def test_cancelled_before_the_producer_answered(desk: Desk) -> None:
    desk.consumer.start(desk.build_load())
    desk.consumer.cancel("d")
    assert desk.sent == [wire.Hello(IDENTITY), wire.Cancel("g#0-d")]
    output = desk.take()
    assert (output.failed_receiving, output.stats.failures) == ({"d": 0}, {})
    desk.welcome()
    assert desk.sent == []
    assert desk.are_untouched(OURS)


def test_cancelled_while_a_piece_is_on_its_way(desk: Desk) -> None:
    desk.network.is_slow = True
    desk.start()
    desk.consumer.advance()
    desk.consumer.cancel("d")
    assert desk.take() == ConnectorOutput()
    desk.network.arrive()
    desk.consumer.advance()
    assert desk.take().failed_receiving == {"d": 0}
    assert desk.sent[-1] == wire.Cancel("g#0-d")
    assert not desk.consumer.wants_to_run


def test_cancelled_when_everything_is_read_ends_as_it_would_have(desk: Desk) -> None:
    desk.start()
    desk.read_all()
    desk.consumer.cancel("d")
    desk.grant()
    assert desk.take().finished_receiving == {"d"}


def test_unknown_late_and_duplicate_messages_change_nothing(desk: Desk) -> None:
    desk.start()
    desk.grant()
    desk.grant()
    desk.grant("unknown")
    desk.refuse("expired", "unknown")
    desk.consumer.receive(Endpoint("tcp://127.0.0.1:9", "x"), wire.Opened("t", LEASE_S, b""))
    desk.consumer.lose(Endpoint("tcp://127.0.0.1:9", "x"), "whatever")
    desk.consumer.cancel("unknown")
    assert desk.take() == ConnectorOutput(stats=ConnectorStats(failures={"protocol": 1}))
    desk.read_all()
    desk.grant()
    output = desk.take()
    assert (output.finished_receiving, output.stats.failures) == ({"d"}, {})
    assert desk.take() == ConnectorOutput()


def test_an_answer_that_came_before_the_last_byte_counts_when_it_has_come(desk: Desk) -> None:
    desk.network.is_slow = True
    desk.start()
    desk.consumer.advance()
    desk.grant()
    for _ in range(6):
        desk.network.arrive()
        assert desk.take() == ConnectorOutput()
        desk.consumer.advance()
        desk.consumer.advance()
    desk.network.arrive()
    desk.consumer.advance()
    assert desk.take().finished_receiving == {"d"}
    assert [type(message).__name__ for message in desk.sent] == ["Hello", "Open", "Close"]


@pytest.mark.parametrize(("seconds", "lasted"), [(LEASE_S - 0.1, True), (LEASE_S, False), (5 * LEASE_S, False)])
def test_a_lease_that_may_have_ended_before_the_last_byte_came_proves_nothing(
    desk: Desk, seconds: float, lasted: bool
) -> None:
    """The transfer thread stood still meanwhile; then the producer is asked once more, and has the last word."""
    desk.network.is_slow = True
    desk.start(desk.build_load(first=6))
    desk.consumer.advance()
    desk.grant()
    desk.network.arrive()
    assert [type(message).__name__ for message in desk.sent] == ["Hello", "Open"]
    desk.now += seconds
    desk.consumer.advance()
    assert [type(message).__name__ for message in desk.sent] == (["Close"] if lasted else ["Open"])
    if not lasted:
        desk.consumer.advance()
        assert (desk.take(), desk.sent) == (ConnectorOutput(), [])
        desk.now += TIMEOUT_S - 1  # an answer that takes longer than a lease is proof all the same
        desk.grant()
    assert desk.take().finished_receiving == {"d"}


def test_a_lease_that_ended_before_the_last_byte_came_costs_the_load(desk: Desk) -> None:
    desk.start()
    desk.grant()
    desk.now += LEASE_S
    desk.read_all()
    assert desk.sent[-1] == wire.Open("g#0-d", b"prompt", serial=1)
    desk.refuse("expired")
    output = desk.take()
    assert (output.failed_receiving, output.stats.failures) == ({"d": 0}, {"expired": 1})
    assert desk.are_wiped(OURS)


def test_an_old_answer_that_comes_again_does_not_lengthen_a_lease(desk: Desk) -> None:
    """Between the second question and its answer the producer's lease may have ended."""
    desk.network.is_slow = True
    desk.start()
    desk.consumer.advance()
    old = desk.build_opened()
    desk.grant()
    for _ in range(7):
        desk.now += TIMEOUT_S - 1
        desk.consumer.receive(PRODUCER, old)
        desk.network.arrive()
        desk.consumer.advance()
        desk.consumer.advance()
    assert desk.now > LEASE_S
    output = desk.take()
    assert (output.finished_receiving, output.stats.failures) == (set(), {"protocol": 7})
    desk.grant()
    desk.grant()
    assert desk.take().finished_receiving == {"d"}


def test_between_pieces_beside_a_forward_pass_there_is_a_pause(desk: Desk) -> None:
    busy_s = iter(range(1000))
    desk.consumer.pace = ReadPace(lambda: next(busy_s) / 1000)
    desk.start(desk.build_load(first=4))
    desk.consumer.pace.begin_step()
    desk.consumer.advance()
    pause_s = desk.consumer.pause_s
    assert pause_s > 0
    desk.consumer.advance()
    assert desk.are_untouched(OURS[5:])
    desk.now += pause_s
    assert desk.consumer.pause_s == 0
    desk.consumer.advance()
    assert desk.are_untouched(OURS[6:])
    desk.now += desk.consumer.pause_s
    desk.consumer.pace.end_step()
    desk.consumer.advance()
    desk.grant()
    assert desk.take().finished_receiving == {"d"}


def test_the_producer_hears_whether_reads_need_it(desk: Desk) -> None:
    desk.start()
    desk.network.remote.is_one_sided = True
    desk.start(desk.build_load("e"))
    opens = [message for message in desk.sent if isinstance(message, wire.Open)]
    assert [message.is_one_sided for message in opens] == [False, True]


def test_a_load_that_is_under_way_is_not_begun_again(desk: Desk) -> None:
    load = desk.start()
    desk.consumer.start(load)
    output = desk.take()
    assert (output.failed_receiving, output.stats.failures) == ({}, {"duplicate": 1})
    twice = desk.build_load("e", transfer_id="g#0-d")
    desk.consumer.start(twice)
    assert desk.take().failed_receiving == {"e": 0}
    desk.read_all()
    desk.grant()
    assert desk.take().finished_receiving == {"d"}


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ({"generation": "h"}, "stale"),
        ({"identity": build_context(Role.PREFILL, {}, weights="other").identity}, "foreign"),
        ({"memory": MemoryRegion(1 << 30, 16, 999)}, "foreign"),
        ({"rank": 1}, "foreign"),
        ({"agent": b"garbage"}, "transport"),
    ],
)
def test_a_producer_that_is_not_the_expected_one(desk: Desk, parts: dict[str, Any], kind: str) -> None:
    desk.consumer.start(desk.build_load())
    desk.welcome(**parts)
    output = desk.take()
    assert (output.failed_receiving, output.stats.failures) == ({"d": 0}, {kind: 1})
    assert desk.channels[PRODUCER].is_closed
    assert desk.are_untouched(OURS)


def test_a_producer_that_refuses_the_greeting(desk: Desk) -> None:
    desk.consumer.start(desk.build_load())
    desk.consumer.receive(PRODUCER, wire.Refused("", "foreign", "the engines differ"))
    assert desk.take().stats.failures == {"foreign": 1}
    desk.start(desk.build_load("e"))
    desk.read_all()
    desk.grant("e")
    assert desk.take().finished_receiving == {"e"}


@pytest.mark.parametrize("block_ids", [[-1, 8, 7, 6, 5, 4, 3], [9, 8, 7, 6, 5, 4, 16], [9, 8]])
def test_a_reference_to_blocks_that_do_not_exist(desk: Desk, block_ids: list[int]) -> None:
    desk.start(desk.build_load(block_ids=block_ids))
    output = desk.take()
    assert (output.failed_receiving, output.stats.failures) == ({"d": 0}, {"foreign": 1})
    assert desk.are_untouched(OURS)


def test_an_address_that_is_not_allowed(desk: Desk) -> None:
    desk.consumer.start(desk.build_load(address="tcp://192.0.2.9:80"))
    assert desk.take().stats.failures == {"foreign": 1}
    desk.consumer.release(desk.build_load(address="tcp://192.0.2.9:80").reference)
    assert desk.channels == {}


@pytest.mark.parametrize("phase", ["connecting", "reading", "confirming"])
def test_a_producer_that_does_not_answer(desk: Desk, phase: str) -> None:
    desk.network.is_slow = phase == "reading"
    desk.consumer.start(desk.build_load())
    if phase != "connecting":
        desk.welcome()
        desk.consumer.advance()
        if phase == "confirming":
            desk.read_all()
    due = desk.consumer.next_due
    assert due is not None
    assert due <= TIMEOUT_S
    desk.now = TIMEOUT_S - 0.1
    desk.consumer.advance()
    assert desk.take() == ConnectorOutput()
    desk.now = TIMEOUT_S
    desk.consumer.advance()
    output = desk.take()
    assert (output.failed_receiving, output.stats.failures) == ({"d": 0}, {"timeout": 1})
    assert desk.network.pending == []
    assert desk.consumer.next_due is None
    assert desk.network.is_connected == (phase == "confirming")


def test_loads_that_wait_for_their_turn_are_not_late(desk: Desk) -> None:
    desk.network.is_slow = True
    desk.start()
    desk.start(desk.build_load("e"))
    desk.consumer.advance()
    for _ in range(7):
        desk.grant_what_was_asked()
        desk.now += TIMEOUT_S - 1
        desk.network.arrive()
        desk.consumer.advance()
    assert desk.take().finished_receiving == {"d"}
    desk.network.is_slow = False
    desk.read_all()
    desk.grant_what_was_asked()
    assert desk.take().finished_receiving == {"e"}


def test_the_producer_is_asked_again_for_everything_that_was_opened_once_it_has_answered(desk: Desk) -> None:
    desk.network.is_slow = True
    desk.start()
    desk.start(desk.build_load("e"))
    desk.consumer.advance()
    desk.grant("d")
    assert [type(message).__name__ for message in desk.sent] == ["Hello", "Open", "Open"]
    assert desk.consumer.next_due == LEASE_S / 4
    asked = []
    for answered in (None, "e", "d", None):
        desk.now += 2.6
        desk.network.arrive()
        desk.consumer.advance()
        asked.append([message.transfer_id for message in desk.sent])
        if answered is not None:
            desk.grant(answered)
    assert asked == [[], ["g#0-d"], ["g#0-e"], ["g#0-d"]]


def test_a_connection_that_breaks_costs_its_own_loads_only(desk: Desk) -> None:
    other = Endpoint("tcp://127.0.0.1:5000", "h")
    desk.start()
    desk.consumer.start(desk.build_load("e", address=other.address, generation=other.generation))
    desk.consumer.lose(other, "gone")
    output = desk.take()
    assert (output.failed_receiving, output.stats.failures) == ({"e": 0}, {"disconnected": 1})
    assert desk.channels[other].is_closed
    desk.read_all()
    desk.grant()
    assert desk.take().finished_receiving == {"d"}


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_producer_that_dies_while_it_is_read(desk: Desk, is_slow: bool) -> None:
    desk.network.is_slow = is_slow
    desk.start()
    if is_slow:
        desk.consumer.advance()
    desk.network.is_down = True
    desk.consumer.advance()
    output = desk.take()
    assert (output.failed_receiving, output.stats.failures) == ({"d": 0}, {"disconnected": 1})
    assert not desk.network.is_connected
    assert not desk.consumer.wants_to_run
    assert desk.are_wiped(OURS[:1])


def test_a_release_is_told_and_costs_nothing_when_it_cannot_be(desk: Desk) -> None:
    desk.consumer.release(desk.build_load().reference)
    assert desk.sent == [wire.Hello(IDENTITY), wire.Cancel("g#0-d")]
    desk.consumer.lose(PRODUCER, "nobody there")
    assert desk.take() == ConnectorOutput()


def test_closing_ends_everything_once(desk: Desk) -> None:
    desk.network.is_slow = True
    desk.start()
    desk.start(desk.build_load("e"))
    desk.consumer.advance()
    desk.consumer.drop_all("the end")
    desk.consumer.drop_all("the end")
    assert desk.take().failed_receiving == {"d": 0, "e": 0}
    assert (desk.network.pending, desk.network.is_connected) == ([], False)


def test_pieces_are_as_large_as_the_cache_wants_them() -> None:
    memory = PoolMemory(torch.zeros((2, *TINY_SPEC.block_shape), dtype=torch.bfloat16), TINY_SPEC)
    queue = ReadQueue(None, memory, S, timeout_s=1.0, clock=lambda: 0.0)  # type: ignore[arg-type]
    assert queue._blocks_in_piece == (2 << 20) // TINY_SPEC.block_bytes


def test_checksums_are_little_endian_xxh3() -> None:
    import xxhash

    kv_cache = build_pool(1.0)
    expected = xxhash.xxh3_64_intdigest(kv_cache[3].view(torch.int16).numpy().tobytes())
    assert PoolMemory(kv_cache, TINY_SPEC).get_checksums([3]).tobytes() == np.uint64(expected).tobytes()


def test_a_queued_transfer_gets_signs_of_life_until_it_is_loaded(desk: Desk) -> None:
    load = desk.build_load()
    desk.consumer.keep(load.reference)
    for _ in range(3):
        desk.consumer.advance()
        assert desk.sent[-1:] == [wire.Extend([load.reference.transfer_id])]
        desk.consumer.advance()
        assert desk.sent == []
        assert desk.consumer.next_due == desk.now + LEASE_S / 4
        desk.now += LEASE_S / 4
    desk.start(load)
    desk.read_all()
    desk.grant()
    assert desk.take().finished_receiving == {"d"}
    assert desk.consumer.next_due is None


def test_a_queued_transfer_that_is_released_gets_no_more_signs_of_life(desk: Desk) -> None:
    reference = desk.build_load().reference
    desk.consumer.keep(reference)
    desk.consumer.advance()
    desk.consumer.release(reference)
    assert desk.sent[-1] == wire.Cancel(reference.transfer_id)
    desk.now += LEASE_S
    desk.consumer.advance()
    assert desk.sent == []
    assert desk.consumer.next_due is None


def test_a_producer_lost_meanwhile_is_asked_again_for_a_queued_transfer(desk: Desk) -> None:
    reference = desk.build_load().reference
    desk.consumer.keep(reference)
    desk.consumer.advance()
    desk.consumer.lose(PRODUCER, "cut")
    desk.now += LEASE_S / 4
    desk.consumer.advance()
    assert desk.sent == [wire.Hello(IDENTITY), wire.Extend([reference.transfer_id])]


def test_a_queued_transfer_of_a_producer_that_is_not_allowed_does_no_harm(desk: Desk) -> None:
    desk.consumer.keep(desk.build_load(address="tcp://10.0.0.1:4000").reference)
    desk.consumer.advance()
    assert desk.channels == {}
