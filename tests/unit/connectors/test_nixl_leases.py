"""The book of leases, on a clock that the test moves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

pytest.importorskip("nixl")

from pdserve.connectors.nixl.leases import LeaseError, LeasePendingError, LeaseTable, build_transfer_id, read_serial
from pdserve.connectors.nixl.messages import Offer

GENERATION = "prefill-0@1/ab"
LEASE_S = 10.0


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def make_offer(serial: int, digest: bytes = b"prompt") -> Offer:
    transfer_id = build_transfer_id(GENERATION, serial, "nonce")
    return Offer(f"r{serial}", transfer_id, 5, digest, [serial])


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> LeaseTable:
    return LeaseTable(GENERATION, LEASE_S, clock)


def test_a_transfer_id_tells_who_made_it_and_when() -> None:
    transfer_id = build_transfer_id("a#b/c-d", 17, "ff-00")
    assert read_serial(transfer_id, "a#b/c-d") == 17


@pytest.mark.parametrize(
    ("transfer_id", "kind"),
    [
        (build_transfer_id("another", 0, "n"), "stale"),
        (GENERATION, "stale"),
        ("", "stale"),
        (f"{GENERATION}#", "unknown"),
        (f"{GENERATION}#x-y", "unknown"),
        (f"{GENERATION}#-1-y", "unknown"),
        (f"{GENERATION}#²-y", "unknown"),
    ],
)
def test_made_up_ids_are_refused(table: LeaseTable, transfer_id: str, kind: str) -> None:
    table.add(make_offer(0))
    with pytest.raises(LeaseError) as caught:
        table.open(transfer_id, b"prompt", b"reader")
    assert caught.value.kind == kind


def test_one_that_is_still_to_be_announced_is_pending_and_one_that_ended_is_not(table: LeaseTable) -> None:
    for serial in (0, 1):
        with pytest.raises(LeasePendingError):
            table.open(make_offer(serial).transfer_id, b"prompt", b"reader")
        with pytest.raises(LeasePendingError):
            table.get_read(make_offer(serial).transfer_id, b"reader")
        with pytest.raises(LeasePendingError):
            table.cancel(make_offer(serial).transfer_id, b"reader")
        table.end(table.add(make_offer(serial)))
        with pytest.raises(LeaseError, match="ended"):
            table.open(make_offer(serial).transfer_id, b"prompt", b"reader")


def test_a_right_serial_with_a_wrong_nonce_opens_nothing(table: LeaseTable) -> None:
    table.add(make_offer(0))
    with pytest.raises(LeaseError) as caught:
        table.open(build_transfer_id(GENERATION, 0, "guess"), b"prompt", b"reader")
    assert caught.value.kind == "expired"


def test_only_the_reader_may_close_and_another_prompt_opens_nothing(table: LeaseTable) -> None:
    offer = make_offer(0)
    lease = table.add(offer)
    with pytest.raises(LeaseError) as caught:
        table.open(offer.transfer_id, b"another prompt", b"a")
    assert caught.value.kind == "foreign"
    assert lease.reader is None
    assert table.open(offer.transfer_id, b"prompt", b"a") is lease
    assert lease.reader == b"a"
    for attempt in (
        lambda: table.open(offer.transfer_id, b"prompt", b"b"),
        lambda: table.get_read(offer.transfer_id, b"b"),
        lambda: table.cancel(offer.transfer_id, b"b"),
    ):
        with pytest.raises(LeaseError) as caught:
            attempt()
        assert caught.value.kind == "in_use"
    assert table.get_read(offer.transfer_id, b"a") is lease
    assert table.cancel(offer.transfer_id, b"a") is lease
    assert len(table) == 0


def test_a_one_sided_reader_needs_no_progress(table: LeaseTable) -> None:
    offer = make_offer(0)
    table.add(offer)
    assert not table.needs_progress
    table.open(offer.transfer_id, b"prompt", b"a")
    assert table.needs_progress
    table.open(offer.transfer_id, b"prompt", b"a", is_one_sided=True)
    assert (table.needs_progress, table.is_read) == (False, True)


def test_signs_of_life_move_the_end(table: LeaseTable, clock: Clock) -> None:
    offer = make_offer(0)
    table.add(offer)
    clock.now += 9
    table.open(offer.transfer_id, b"prompt", b"a")
    assert table.next_expiry == clock.now + LEASE_S
    clock.now += 9
    table.extend(offer.transfer_id, b"a")
    clock.now += 9
    table.extend(offer.transfer_id, b"somebody else")
    table.extend("unknown", b"a")
    assert table.take_expired() == []
    clock.now += 1
    assert [lease.offer for lease in table.take_expired()] == [offer]
    assert table.take_expired() == []
    assert table.next_expiry is None


def test_a_sign_of_life_that_comes_too_late_does_not_revive(table: LeaseTable, clock: Clock) -> None:
    offer = make_offer(0)
    table.add(offer)
    table.open(offer.transfer_id, b"prompt", b"a")
    clock.now += LEASE_S
    table.extend(offer.transfer_id, b"a")
    with pytest.raises(LeaseError) as caught:
        table.get_read(offer.transfer_id, b"a")
    assert caught.value.kind == "expired"
    assert len(table.take_expired()) == 1


def test_a_lease_that_nobody_has_opened_is_extended_by_who_waits_for_it(table: LeaseTable, clock: Clock) -> None:
    offer = make_offer(0)
    table.add(offer)
    for _ in range(5):
        clock.now += LEASE_S - 1
        table.extend(offer.transfer_id, b"a")
    table.open(offer.transfer_id, b"prompt", b"b")
    clock.now += LEASE_S - 1
    table.extend(offer.transfer_id, b"a")
    clock.now += 1
    assert [lease.offer for lease in table.take_expired()] == [offer]


def test_every_expired_entry_is_reaped_whatever_its_place(table: LeaseTable, clock: Clock) -> None:
    for serial in range(6):
        table.add(make_offer(serial))
    for serial in (0, 3):
        table.open(make_offer(serial).transfer_id, b"prompt", b"a")
    clock.now += LEASE_S - 1
    for serial in (0, 3):
        table.extend(make_offer(serial).transfer_id, b"a")
    clock.now += 1
    assert [lease.offer.request_id for lease in table.take_expired()] == ["r1", "r2", "r4", "r5"]


class LeaseMachine(RuleBasedStateMachine):
    """Against a plain dictionary: each lease ends exactly once, at its time or when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.table = LeaseTable(GENERATION, LEASE_S, self.clock)
        self.model: dict[int, tuple[float, bytes | None]] = {}
        self.next_serial = 0

    def _is_live(self, serial: int) -> bool:
        return serial in self.model and self.clock.now < self.model[serial][0]

    @rule()
    def offer(self) -> None:
        self.table.add(make_offer(self.next_serial))
        self.model[self.next_serial] = (self.clock.now + LEASE_S, None)
        self.next_serial += 1

    @rule(serial=st.integers(0, 6), reader=st.sampled_from([b"a", b"b"]))
    def open(self, serial: int, reader: bytes) -> None:
        try:
            self.table.open(make_offer(serial).transfer_id, b"prompt", reader)
        except LeasePendingError:
            assert serial >= self.next_serial
        except LeaseError:
            assert not self._is_live(serial) or self.model[serial][1] not in (None, reader)
        else:
            assert self._is_live(serial)
            assert self.model[serial][1] in (None, reader)
            self.model[serial] = (self.clock.now + LEASE_S, reader)

    @rule(serial=st.integers(0, 6), reader=st.sampled_from([b"a", b"b"]))
    def extend(self, serial: int, reader: bytes) -> None:
        self.table.extend(make_offer(serial).transfer_id, reader)
        if self._is_live(serial) and self.model[serial][1] in (None, reader):
            self.model[serial] = (self.clock.now + LEASE_S, self.model[serial][1])

    @rule(serial=st.integers(0, 6), reader=st.sampled_from([b"a", b"b"]))
    def close(self, serial: int, reader: bytes) -> None:
        try:
            self.table.end(self.table.get_read(make_offer(serial).transfer_id, reader))
        except (LeasePendingError, LeaseError):
            assert not (self._is_live(serial) and self.model[serial][1] == reader)
        else:
            assert self._is_live(serial)
            assert self.model.pop(serial)[1] == reader

    @rule(serial=st.integers(0, 6), reader=st.sampled_from([b"a", b"b"]))
    def cancel(self, serial: int, reader: bytes) -> None:
        try:
            self.table.cancel(make_offer(serial).transfer_id, reader)
        except (LeasePendingError, LeaseError):
            assert not (self._is_live(serial) and self.model[serial][1] in (None, reader))
        else:
            assert self.model.pop(serial)[1] in (None, reader)

    @rule(seconds=st.sampled_from([0.5, 4.0, 10.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.now += seconds
        expired = {read_serial(lease.offer.transfer_id, GENERATION) for lease in self.table.take_expired()}
        due = {serial for serial in self.model if not self._is_live(serial)}
        assert expired == due
        for serial in due:
            del self.model[serial]

    @invariant()
    def as_many_as_the_model_has(self) -> None:
        assert len(self.table) == len(self.model)
        assert self.table.is_read == any(reader is not None for _, reader in self.model.values())


LeaseMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLeaseMachine = LeaseMachine.TestCase
