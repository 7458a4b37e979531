"""A pause that grows with the wait, between its bounds."""

from __future__ import annotations

import pytest

from pdserve.engine.transfer_poll import get_transfer_poll_s


@pytest.mark.parametrize(("waited_s", "pause_s"), [(0.0, 0.001), (0.008, 0.002), (0.012, 0.003), (60.0, 0.004)])
def test_a_quarter_of_the_wait(waited_s: float, pause_s: float) -> None:
    assert get_transfer_poll_s(waited_s) == pytest.approx(pause_s)
