"""The producer's side: answers and ends, on a clock that the test moves; memory and checksums are real."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import xxhash

pytest.importorskip("nixl")

from pdserve.connectors.blocks.failures import WarningLimiter
from pdserve.connectors.nixl import wire
from pdserve.connectors.nixl import worker as worker_module
from pdserve.connectors.nixl.leases import LeaseTable, build_transfer_id
from pdserve.connectors.nixl.messages import Offer
from pdserve.connectors.nixl.pool_memory import PoolMemory
from pdserve.connectors.nixl.producer import Producer
from pdserve.connectors.nixl.report import TransferReport
from pdserve.connectors.testing import build_context
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.protocol import Role

IDENTITY = build_context(Role.PREFILL, {}).identity
LEASE_S = 10.0


@dataclass
class Desk:
    """A producer with everything around it in reach."""

    now: float = 0.0
    replies: list[tuple[bytes, wire.ProducerMessage]] = field(default_factory=list)
    serial: int = 0

    def __post_init__(self) -> None:
        self.kv_cache = torch.arange(8 * TINY_SPEC.block_bytes // 2, dtype=torch.int16).view(torch.bfloat16)
        self.kv_cache = self.kv_cache.reshape(8, *TINY_SPEC.block_shape).clone()
        self.report = TransferReport()
        memory = PoolMemory(self.kv_cache, TINY_SPEC)
        self.producer = Producer(
            wire.Welcome("g", IDENTITY, b"agent", memory.region),
            LeaseTable("g", LEASE_S, lambda: self.now),
            memory,
            self.report,
            WarningLimiter(worker_module.logger, lambda: self.now),
            reply=lambda reader, message: self.replies.append((reader, message)),
            clock=lambda: self.now,
        )

    def build_offer(self) -> Offer:
        offer = Offer(f"r{self.serial}", build_transfer_id("g", self.serial, "n"), 9, b"prompt", [4, 2, 6])
        self.serial += 1
        return offer

    def offer(self, offer: Offer | None = None) -> Offer:
        """Announce, as the worker half does."""
        offer = offer or self.build_offer()
        self.report.start_sending(offer.request_id)
        self.producer.offer(offer)
        return offer

    def take_checksums(self) -> None:
        self.producer.advance()

    def say(self, message: wire.ConsumerMessage, reader: bytes = b"a") -> list[wire.ProducerMessage]:
        """What comes back at once."""
        before = len(self.replies)
        self.producer.receive(reader, message)
        return [reply for _, reply in self.replies[before:]]

    def take_sent(self, *offers: Offer) -> dict[str, bool]:
        """Ended sendings, and whether they ended well."""
        output = self.report.take([offer.request_id for offer in offers])
        return {request_id: request_id not in output.failed_sending for request_id in output.finished_sending}


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_whole_transfer(desk: Desk) -> None:
    offer = desk.offer()
    assert desk.take_sent(offer) == {}
    desk.take_checksums()
    (opened,) = desk.say(wire.Open(offer.transfer_id, b"prompt"))
    rows = desk.kv_cache.view(torch.int16).reshape(8, -1).numpy()
    expected = [xxhash.xxh3_64_intdigest(rows[block_id].tobytes()) for block_id in (4, 2, 6)]
    assert opened == wire.Opened(offer.transfer_id, LEASE_S, np.array(expected, dtype="<u8").tobytes())
    assert desk.take_sent() == {}
    assert desk.say(wire.Close(offer.transfer_id, 2)) == []
    output = desk.report.take([])
    assert (output.finished_sending, output.failed_sending) == ({"r0"}, set())
    assert output.sent_bytes == {"r0": 2 * TINY_SPEC.block_bytes}
    assert (output.stats.num_blocks_saved, output.stats.failures) == (2, {})
    (refused,) = desk.say(wire.Close(offer.transfer_id, 2))
    assert isinstance(refused, wire.Refused)


def test_a_consumer_that_is_faster_than_the_checksums_waits_for_them(desk: Desk) -> None:
    offer = desk.offer()
    assert desk.say(wire.Open(offer.transfer_id, b"prompt")) == []
    desk.take_checksums()
    ((reader, opened),) = desk.replies
    assert (reader, type(opened)) == (b"a", wire.Opened)
    assert desk.take_sent(offer) == {}
    desk.say(wire.Close(offer.transfer_id, 3))
    assert desk.take_sent() == {"r0": True}


def test_checksums_are_gone_on_with_at_once(desk: Desk) -> None:
    desk.offer()
    assert desk.producer.next_due == desk.now
    desk.take_checksums()
    assert desk.producer.next_due == desk.now + LEASE_S


def test_a_consumer_that_is_faster_than_the_engines_step_waits_for_it(desk: Desk) -> None:
    offer = desk.build_offer()
    assert desk.say(wire.Open(offer.transfer_id, b"prompt")) == []
    desk.offer(offer)
    desk.take_checksums()
    ((reader, opened),) = desk.replies
    assert (reader, type(opened)) == (b"a", wire.Opened)


def test_each_question_of_a_reader_is_answered_once_and_moves_its_leases_end(desk: Desk) -> None:
    offer = desk.offer()
    desk.say(wire.Open(offer.transfer_id, b"prompt"))
    desk.take_checksums()
    for _ in range(3):
        desk.now += LEASE_S - 1
        assert [type(reply) for reply in desk.say(wire.Open(offer.transfer_id, b"prompt"))] == [wire.Opened]
        desk.producer.advance()
    assert len(desk.replies) == 4
    assert desk.take_sent(offer) == {}


def test_an_answer_carries_the_number_of_the_last_question(desk: Desk) -> None:
    offer = desk.offer()
    for serial in (0, 1):
        assert desk.say(wire.Open(offer.transfer_id, b"prompt", serial=serial)) == []
    desk.take_checksums()
    desk.say(wire.Open(offer.transfer_id, b"prompt", serial=7))
    assert [reply.serial for _, reply in desk.replies if isinstance(reply, wire.Opened)] == [1, 7]


def test_a_cancel_that_is_faster_than_the_engines_step_counts(desk: Desk) -> None:
    offer = desk.build_offer()
    desk.say(wire.Cancel(offer.transfer_id))
    desk.offer(offer)
    assert desk.take_sent(offer) == {"r0": True}


def test_nobody_waits_for_ever_for_what_was_never_offered(desk: Desk) -> None:
    desk.say(wire.Open(build_transfer_id("g", 99, "n"), b"prompt"))
    desk.producer.advance()
    assert desk.replies == []
    assert desk.producer.next_due is not None
    desk.now = desk.producer.next_due
    desk.producer.advance()
    ((reader, refused),) = desk.replies
    assert isinstance(refused, wire.Refused)
    assert (reader, refused.kind) == (b"a", "unknown")
    assert desk.producer.next_due is None


def test_questions_that_wait_are_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.connectors.nixl.producer._MAX_EARLY_MESSAGES", 3)
    answers = [desk.say(wire.Open(build_transfer_id("g", 50 + index, "n"), b"prompt")) for index in range(5)]
    assert [len(answer) for answer in answers] == [0, 0, 0, 1, 1]


def test_expiry_frees_waiting_and_read_transfers_alike(desk: Desk) -> None:
    waiting, reading = desk.offer(), desk.offer()
    desk.say(wire.Open(reading.transfer_id, b"prompt"))
    desk.now = LEASE_S - 1
    desk.producer.advance()
    assert desk.take_sent(waiting, reading) == {}
    desk.say(wire.Extend([reading.transfer_id]))
    desk.now = LEASE_S
    desk.producer.advance()
    assert desk.take_sent() == {"r0": False}
    desk.now = 2 * LEASE_S
    (refused,) = desk.say(wire.Close(reading.transfer_id, 3))
    assert isinstance(refused, wire.Refused)
    assert refused.kind == "expired"
    desk.producer.advance()
    assert desk.take_sent() == {"r1": False}
    assert desk.producer.next_due is None


def test_a_transfer_that_a_consumer_waits_for_is_held_beyond_its_lease(desk: Desk) -> None:
    offer = desk.offer()
    for _ in range(4):
        desk.now += LEASE_S - 1
        assert desk.say(wire.Extend([offer.transfer_id])) == []
        desk.producer.advance()
    assert desk.take_sent(offer) == {}
    assert [type(reply) for reply in desk.say(wire.Open(offer.transfer_id, b"prompt"))] == [wire.Opened]
    desk.now += LEASE_S
    desk.producer.advance()
    assert desk.take_sent() == {"r0": False}


@pytest.mark.parametrize("has_answer", [False, True])
def test_a_reader_whose_lease_ends_is_told(desk: Desk, has_answer: bool) -> None:
    offer = desk.offer()
    desk.say(wire.Open(offer.transfer_id, b"prompt"))
    if has_answer:
        desk.take_checksums()
    desk.now = LEASE_S
    desk.producer.advance()
    assert isinstance(desk.replies[-1][1], wire.Refused)
    assert len(desk.replies) == 1 + has_answer
    assert desk.take_sent(offer) == {"r0": False}


def test_a_cancelled_request_ends_at_once_and_its_reader_gets_nothing(desk: Desk) -> None:
    offer = desk.offer()
    desk.take_checksums()
    desk.say(wire.Open(offer.transfer_id, b"prompt"))
    desk.producer.cancel_request("r0")
    desk.producer.cancel_request("r0")
    desk.producer.cancel_request("never heard of")
    assert desk.take_sent(offer) == {"r0": False}
    (refused,) = desk.say(wire.Close(offer.transfer_id, 3))
    assert isinstance(refused, wire.Refused)


def test_only_the_reader_may_cancel_what_it_reads(desk: Desk) -> None:
    offer = desk.offer()
    desk.say(wire.Open(offer.transfer_id, b"prompt"), b"a")
    assert desk.say(wire.Cancel(offer.transfer_id), b"b") == []
    assert desk.take_sent(offer) == {}
    desk.say(wire.Cancel(offer.transfer_id), b"a")
    assert desk.take_sent() == {"r0": True}


def test_another_prompts_open_harms_nobody(desk: Desk) -> None:
    offer = desk.offer()
    (refused,) = desk.say(wire.Open(offer.transfer_id, b"guessed"), b"thief")
    assert isinstance(refused, wire.Refused)
    assert refused.kind == "foreign"
    assert desk.say(wire.Open(offer.transfer_id, b"prompt"), b"a") == []


def test_a_consumer_of_another_model_is_told_what_differs(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    other = build_context(Role.DECODE, {}, weights="other").identity
    (refused,) = desk.say(wire.Hello(other))
    (record,) = caplog.records
    assert "weights other here, weights-1 there" in record.getMessage()
    assert isinstance(refused, wire.Refused)
    assert "weights other here, weights-1 there" in refused.reason
    (refused,) = desk.say(wire.Hello(IDENTITY, version=99))
    assert isinstance(refused, wire.Refused)
    assert "protocol version 99 there" in refused.reason
    assert len(caplog.records) == 1  # one in a while
    (welcome,) = desk.say(wire.Hello(IDENTITY))
    assert isinstance(welcome, wire.Welcome)


def test_a_consumers_words_do_not_break_the_log(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    other = build_context(Role.DECODE, {}, weights="x\nERROR all is lost " + 10_000 * "x").identity
    desk.say(wire.Hello(other))
    (record,) = caplog.records
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 1000


def test_the_agent_is_kept_going_while_somebody_may_need_it(desk: Desk) -> None:
    intervals = []
    offer = desk.offer()
    for seconds, message in (
        (0.0, None),
        (0.0, wire.Hello(IDENTITY)),
        (3.0, None),
        (0.0, wire.Open(offer.transfer_id, b"prompt")),
        (3.0, None),
        (0.0, wire.Open(offer.transfer_id, b"prompt", is_one_sided=True)),
        (LEASE_S, None),
    ):
        desk.now += seconds
        if message is not None:
            desk.say(message)
        desk.producer.advance()
        intervals.append(desk.producer.progress_interval_s)
    assert intervals == [None, 0.001, None, 0.0001, 0.001, 0.001, None]


def test_reports_come_once_and_only_when_due(desk: Desk) -> None:
    report = TransferReport()
    report.start_sending("r")
    report.end_sending("r", ok=True, num_bytes=5)
    assert report.take([]).finished_sending == set()
    assert report.take(["unknown"]).stats.failures == {"unknown": 1}
    output = report.take(["r", "r"])
    assert (output.finished_sending, output.sent_bytes, output.stats.failures) == ({"r"}, {"r": 5}, {"unknown": 1})
    assert report.take(["r"]).stats.failures == {"unknown": 1}


def test_the_engine_is_woken_by_each_end_when_it_can_be_heard_of() -> None:
    report = TransferReport()
    heard: list[object] = []
    report.wake = lambda: heard.append(report.take([]).finished_receiving or len(report._sent))
    report.start_load("l")
    report.end_load("l", num_good_tokens=None, num_blocks=1, num_bytes=1, seconds=0.0)
    report.start_sending("s")
    report.end_sending("s", ok=True, num_bytes=5)
    assert heard == [{"l"}, 1]


def test_slots_behind_the_prompts_end_are_zeroed() -> None:
    kv_cache = torch.ones((2, *TINY_SPEC.block_shape), dtype=torch.bfloat16)
    memory = PoolMemory(kv_cache, TINY_SPEC)
    memory.clear_behind(1, 3)
    assert (kv_cache[1, :, :, :, :3] == 1).all()
    assert (kv_cache[1, :, :, :, 3:] == 0).all()
    assert (kv_cache[0] == 1).all()
    memory.wipe([0])
    assert (kv_cache[0] == 0).all()
