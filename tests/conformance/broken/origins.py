"""Where block keys come from, for connectors that make identities of their own instead of using the engine's.

The contract hands a connector finished keys, so that none can forget a salt or a dtype. Connectors ported from
elsewhere hash token ids themselves; these tests play that by remembering what each key was made of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from unittest import mock

from pdserve.kv_layout import BlockHasher, BlockKey


@dataclass(frozen=True)
class Origin:
    token_ids: tuple[int, ...]
    cache_salt: str
    adapter: str


ORIGINS: dict[bytes, Origin] = {}
_real_init = BlockHasher.__init__
_real_keys = BlockHasher.block_keys


def _init(self: BlockHasher, fingerprint: str, *, cache_salt: str = "", adapter: str = "") -> None:
    _real_init(self, fingerprint, cache_salt=cache_salt, adapter=adapter)
    self._parts = (cache_salt, adapter)  # type: ignore[attr-defined]


def _keys(self: BlockHasher, token_ids: Sequence[int], block_size: int) -> list[BlockKey]:
    keys = _real_keys(self, token_ids, block_size)
    end = 0
    for key in keys:
        end += key.num_tokens
        ORIGINS[key.digest] = Origin(tuple(token_ids[:end]), *self._parts)  # type: ignore[attr-defined]
    return keys


def remember_origins() -> mock._patch_dict:
    """A context manager; inside, `ORIGINS` knows every key."""
    return mock.patch.multiple(BlockHasher, __init__=_init, block_keys=_keys)  # type: ignore[return-value]
