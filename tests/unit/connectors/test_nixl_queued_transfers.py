"""When producers of transfers that wait for their turn get a sign of life."""

from __future__ import annotations

import pytest

pytest.importorskip("nixl")

from pdserve.connectors.nixl.messages import TransferReference
from pdserve.connectors.nixl.queued_transfers import QueuedTransfers

LEASE_S = 20.0


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def queued(clock: Clock) -> QueuedTransfers:
    return QueuedTransfers(clock)


def make_reference(name: str, producer: str = "g") -> TransferReference:
    return TransferReference(f"{producer}#{name}", producer, "tcp://127.0.0.1:4000", LEASE_S, [1, 2])


def test_the_first_sign_is_due_at_once_and_four_more_in_a_lease(queued: QueuedTransfers, clock: Clock) -> None:
    reference = make_reference("a")
    queued.add(reference)
    num_signs = 0
    for _ in range(int(LEASE_S)):
        num_signs += len(queued.take_due())
        clock.now += 1
    assert num_signs == 4
    assert queued.take_due() == [[reference]]
    assert queued.next_due == clock.now + 5


def test_those_of_one_producer_go_together(queued: QueuedTransfers) -> None:
    first, second, other = make_reference("a"), make_reference("b"), make_reference("a", "h")
    for reference in (first, other, second):
        queued.add(reference)
    assert queued.take_due() == [[first, second], [other]]
    assert queued.take_due() == []


def test_what_is_removed_is_not_due_any_more(queued: QueuedTransfers) -> None:
    reference = make_reference("a")
    queued.add(reference)
    queued.remove(reference)
    queued.remove(reference)
    assert (queued.take_due(), queued.next_due) == ([], None)


def test_the_earliest_is_found_whatever_came_when(queued: QueuedTransfers, clock: Clock) -> None:
    first, second = make_reference("a"), make_reference("b")
    queued.add(first)
    queued.take_due()
    clock.now += 1
    queued.add(second)
    assert queued.next_due == clock.now
    assert queued.take_due() == [[second]]
    assert queued.next_due == clock.now + 4
    queued.remove(first)
    clock.now += 4
    assert queued.take_due() == []
    assert queued.next_due == clock.now + 1
