"""The shared tier, asked for what it holds."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from pdserve.connectors.base import ConnectorContext
from pdserve.connectors.blocks.asked_index import UnansweredError
from pdserve.connectors.lmcache.deadline_calls import CallFailedError, DeadlineCalls
from pdserve.connectors.lmcache.directories import EngineDirectories
from pdserve.connectors.lmcache.opening import open_for_lookups
from pdserve.connectors.lmcache.options import LMCacheOptions
from pdserve.kv_layout import BlockKey

_NUM_CALLS = 2
_CLOSE_TIMEOUT_S = 5.0


class LMCacheLookup:
    """Asks LMCache, and waits no longer than ``lookup_timeout_s``. Thread-safe.

    Args:
        context: the engine.
        options: where, and how long to wait.

    Raises:
        ConfigError: LMCache cannot be started.
    """

    def __init__(self, context: ConnectorContext, options: LMCacheOptions) -> None:
        self.place = f"LMCache at {options.url}"
        self._timeout_s = options.lookup_timeout_s
        self._calls = DeadlineCalls("lmcache-lookup", _NUM_CALLS)
        directories = EngineDirectories(options, can_write=False)
        self._engine = open_for_lookups(context, options, directories, self._calls)
        self._is_closed = False

    def count_stored_run(self, keys: Sequence[BlockKey]) -> int:
        """How many of ``keys`` are shared, up to the first that is not.

        Raises:
            UnansweredError: LMCache failed, or did not answer in time.
        """
        try:
            return self._calls.run(functools.partial(self._engine.count_stored_run, keys), self._timeout_s)
        except CallFailedError as error:
            raise UnansweredError(error.failure) from error

    def close(self) -> None:
        """End LMCache's threads; idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._calls.close_after(self._engine.close, _CLOSE_TIMEOUT_S)
