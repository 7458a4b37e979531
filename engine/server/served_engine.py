"""What the server needs of an engine; `pdserve.engine.core.EngineCore` is one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from pdserve.protocol import AddRequest, CacheEvents, GrammarSpec, InstanceLoad, RequestOutput


class ServedEngine(Protocol):
    """An engine as its server sees it. One thread calls it."""

    def add_request(self, message: AddRequest, /) -> None:
        """Queue a request.

        Raises:
            PdserveError: why the engine does not take it.
        """
        ...

    def compile_grammar(self, grammar: GrammarSpec, /) -> None:
        """Do ahead of `add_request` what takes long about a request's grammar. The one method for any thread.

        Raises:
            PdserveError: why the engine does not take it.
        """
        ...

    def abort_requests(self, request_ids: Iterable[str], /) -> None:
        """End requests without output; unknown ids are ignored."""
        ...

    def has_work(self) -> bool:
        """Whether a step would compute tokens."""
        ...

    def has_transfers(self) -> bool:
        """Whether KV moves or is held, so that steps must go on."""
        ...

    def step(self) -> list[RequestOutput]:
        """Go on by one step."""
        ...

    def get_load(self) -> InstanceLoad:
        """How busy it is."""
        ...

    def listen_to_cache(self) -> CacheEvents:
        """Note cache events from now on; the whole prefix index as it stands."""
        ...

    def ignore_cache(self) -> None:
        """Note no cache events any more."""
        ...

    def take_cache_events(self) -> CacheEvents | None:
        """How the prefix index changed since the last call; None when it did not."""
        ...
