from __future__ import annotations

import pytest

from pdserve.errors import OverloadedError
from pdserve.router import rate_limits
from pdserve.router.rate_limits import KeyLimits


def test_one_key_has_so_many_requests_and_others_have_their_own() -> None:
    limits = KeyLimits(max_concurrent=2, tokens_per_minute=0)
    for _ in range(2):
        limits.enter("a", 10**9, 0.0)
    with pytest.raises(OverloadedError, match="2 requests in progress"):
        limits.enter("a", 1, 0.0)
    limits.enter("b", 1, 0.0)
    limits.leave("a", 10**9, 0.0)
    limits.enter("a", 1, 0.0)


def test_overdrawn_key_waits_until_its_debt_is_paid() -> None:
    limits = KeyLimits(max_concurrent=0, tokens_per_minute=600)
    limits.enter("a", 500, 0.0)
    limits.enter("a", 100, 0.0)
    limits.leave("a", 49, 0.0)
    with pytest.raises(OverloadedError) as refused:
        limits.enter("a", 1, 0.0)
    assert refused.value.retry_after_s == pytest.approx(5.0)
    assert (refused.value.http_status, refused.value.code) == (429, "rate_limit_exceeded")
    with pytest.raises(OverloadedError):
        limits.enter("a", 1, 4.0)
    limits.enter("a", 1, 5.0)


def test_nothing_is_saved_beyond_a_minutes_worth() -> None:
    limits = KeyLimits(max_concurrent=0, tokens_per_minute=60)
    limits.enter("a", 0, 0.0)
    limits.enter("a", 60, 10_000.0)
    with pytest.raises(OverloadedError):
        limits.enter("a", 1, 10_000.0)


def test_refused_request_costs_nothing() -> None:
    limits = KeyLimits(max_concurrent=1, tokens_per_minute=60)
    limits.enter("a", 1, 0.0)
    for _ in range(5):
        with pytest.raises(OverloadedError):
            limits.enter("a", 1000, 0.0)
    limits.leave("a", 1, 0.0)
    limits.enter("a", 1, 0.0)


def test_keys_without_requests_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rate_limits, "_MAX_IDLE_KEYS", 3)
    limits = KeyLimits(max_concurrent=1, tokens_per_minute=60)
    for key in "abcdef":
        limits.enter(key, 1, 0.0)
        limits.leave(key, 1, 0.0)
    assert len(limits._accounts) == 3
