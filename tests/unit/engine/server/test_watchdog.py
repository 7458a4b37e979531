"""The watchdog: when it looks and what it tells."""

from __future__ import annotations

import logging

import pytest

from pdserve.engine.server.watchdog import BlockWatchdog


def test_it_looks_at_intervals_and_tells_at_most_five(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    looks: list[float] = []

    def check() -> list[str]:
        looks.append(now_s[0])
        return [f"block {i}" for i in range(7)]

    watchdog = BlockWatchdog(check, 2.0, lambda: now_s[0])
    with caplog.at_level(logging.ERROR, logger="pdserve"):
        for now_s[0] in (0.0, 1.9, 2.0, 3.0, 4.5):
            watchdog.poll()
    assert looks == [2.0, 4.5]
    assert watchdog.get_wait_s() == 2.0
    assert len(caplog.records) == 2 * 6
    assert caplog.records[5].getMessage() == "KV blocks: and 2 more"
