from __future__ import annotations

import pytest

from pdserve.engine.announcement_wait import AnnouncementWait


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def find_length_s(wait: AnnouncementWait, clock: Clock, precision_s: float = 0.0001) -> float:
    began_s = clock.now_s
    while not wait.is_over:
        clock.now_s += precision_s
    return clock.now_s - began_s


def test_it_lasts_a_twentieth_of_the_longest_step_of_late(clock: Clock) -> None:
    wait = AnnouncementWait(clock)
    assert wait.is_over
    lengths_s = []
    for step_s in (0.6, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02, 0.8):
        wait.note_step(step_s)
        lengths_s.append(find_length_s(wait, clock))
    expected_s = [0.03, 0.015, 0.0075, 0.00375, 0.001875, 0.001, 0.001, 0.04]
    assert lengths_s == pytest.approx(expected_s, abs=0.00011)
