"""A request, and what the harness keeps for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.connectors.base import KVRequest


@dataclass
class LiveRequest:
    """One request and what the engine keeps for it."""

    request: KVRequest
    token_ids: Sequence[int]
    salt: str
    block_ids: list[int] = field(default_factory=list)
    num_local_tokens: int = 0
    num_computed_tokens: int = 0
    num_loading_tokens: int = 0
    is_load_async: bool = True
    has_failed_load: bool = False
    is_finished: bool = False
    is_held: bool = False
