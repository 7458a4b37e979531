"""Reads step aside while the engine computes, and only then."""

from __future__ import annotations

import pytest

pytest.importorskip("nixl")

from pdserve.connectors.nixl.read_pace import ReadPace


def test_there_is_a_pause_only_beside_a_forward_pass_and_as_long_as_the_piece_wants_it() -> None:
    busy_s = 10.0
    pace = ReadPace(lambda: busy_s)
    pauses_s = []
    for change in (None, pace.begin_step, pace.end_step, pace.begin_step):
        if change is not None:
            change()
        pace.begin_piece()
        busy_s += 0.5
        pauses_s.append(pace.get_pause_s())
    assert pauses_s == [0.0, 1.5, 0.0, 1.5]
