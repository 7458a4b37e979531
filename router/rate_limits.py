"""What one API key may use: requests at a time, and tokens a minute.

Tokens are a debt: a request is let in while its key's account is not overdrawn, pays for its prompt then and for
each output token as it comes. So nobody has to guess the length of an answer, and the rate holds in the long run.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from pdserve.errors import OverloadedError

ANONYMOUS = "anonymous"
"""Whoever comes without a key, where none is asked for."""

_MAX_IDLE_KEYS = 10_000
_MINUTE_S = 60.0


@dataclass(slots=True)
class _Account:
    """One key.

    Attributes:
        num_running: its requests that wait or are served.
        tokens: what it may still use, negative when overdrawn.
        seen_s: when ``tokens`` was computed.
    """

    tokens: float
    seen_s: float
    num_running: int = 0


class KeyLimits:
    """The accounts of all keys. Lives on the event loop; times are the loop's.

    Args:
        max_concurrent: requests of one key at a time; 0 = no limit.
        tokens_per_minute: prompt and output tokens of one key; 0 = no limit.
    """

    def __init__(self, max_concurrent: int, tokens_per_minute: int) -> None:
        self._max_concurrent = max_concurrent
        self._tokens_per_minute = tokens_per_minute
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    def enter(self, key_id: str, num_prompt_tokens: int, now_s: float) -> None:
        """A request begins.

        Raises:
            OverloadedError: the key uses all that it may, and says when to come again.
        """
        account = self._get_account(key_id, now_s)
        if self._max_concurrent and account.num_running >= self._max_concurrent:
            raise OverloadedError(
                f"this API key has {account.num_running} requests in progress, the most that it may; try again later"
            )
        if self._tokens_per_minute and account.tokens <= 0:
            wait_s = (1 - account.tokens) * _MINUTE_S / self._tokens_per_minute
            raise OverloadedError(
                f"this API key has used its {self._tokens_per_minute} tokens a minute; try again in {wait_s:.0f} s",
                retry_after_s=wait_s,
            )
        account.num_running += 1
        account.tokens -= num_prompt_tokens

    def leave(self, key_id: str, num_output_tokens: int, now_s: float) -> None:
        """A request that was entered ends, with this many tokens made."""
        account = self._get_account(key_id, now_s)
        account.num_running -= 1
        account.tokens -= num_output_tokens

    def _get_account(self, key_id: str, now_s: float) -> _Account:
        account = self._accounts.get(key_id)
        if account is None:
            account = self._accounts[key_id] = _Account(float(self._tokens_per_minute), now_s)
            self._drop_idle()
        gained = (now_s - account.seen_s) * self._tokens_per_minute / _MINUTE_S
        account.tokens = min(account.tokens + gained, float(self._tokens_per_minute))
        account.seen_s = now_s
        self._accounts.move_to_end(key_id)
        return account

    def _drop_idle(self) -> None:
        """Forget the key that was seen longest ago, so that no number of keys fills the memory."""
        if len(self._accounts) > _MAX_IDLE_KEYS:
            oldest, account = next(iter(self._accounts.items()))
            if not account.num_running:
                del self._accounts[oldest]
