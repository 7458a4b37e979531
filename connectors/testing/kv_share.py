"""One rank's KV memory: filled and compared by the harness itself, never through the connector."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import torch

from pdserve.connectors.testing.kv_content import Bytes, KVContent
from pdserve.kv_layout import DTYPE_BYTES, KVCacheSpec
from pdserve.protocol import Role


class Poison(enum.IntEnum):
    """What lies in blocks that hold no KV; two values each, so that an engine's own garbage is told from a peer's."""

    UNCOMPUTED_PREFILL = 0xA5
    UNCOMPUTED_DECODE = 0xB6
    FREED_PREFILL = 0x5A
    FREED_DECODE = 0x6B


_UNCOMPUTED = {Role.PREFILL: Poison.UNCOMPUTED_PREFILL, Role.DECODE: Poison.UNCOMPUTED_DECODE}
_FREED = {Role.PREFILL: Poison.FREED_PREFILL, Role.DECODE: Poison.FREED_DECODE}


class KVShare:
    """A rank's share of every block of a pool; of the whole blocks where there is one rank.

    Args:
        content: what the rank would compute.
        spec: shape of its share of a block.
        num_blocks: size of the pool.
        role: of the engine; decides its poison.
    """

    def __init__(self, content: KVContent, spec: KVCacheSpec, num_blocks: int, role: Role) -> None:
        self.spec = spec
        self._content = content
        self._size = spec.block_size
        self._num_rows = 2 * spec.num_kv_heads
        self._role = role
        dtype = getattr(torch, spec.dtype)
        self.kv_cache = torch.zeros((num_blocks, *spec.block_shape), dtype=dtype)
        shape = (num_blocks, -1, spec.block_size, spec.head_dim * DTYPE_BYTES[spec.dtype])
        self._bytes: Bytes = self.kv_cache.view(torch.uint8).numpy().reshape(shape)
        self.poison_freed(range(num_blocks))

    def poison_uncomputed(self, block_ids: Sequence[int]) -> None:
        """Blocks get an owner, who has computed nothing yet."""
        self._bytes[list(block_ids)] = _UNCOMPUTED[self._role]

    def poison_freed(self, block_ids: Sequence[int]) -> None:
        """Blocks are nobody's."""
        self._bytes[list(block_ids)] = _FREED[self._role]

    def find_touched(self, free_block_ids: Sequence[int]) -> int | None:
        """The first of ``free_block_ids`` that somebody has written to since."""
        intact = (self._bytes[free_block_ids] == _FREED[self._role]).all(axis=(1, 2, 3))
        return None if intact.all() else free_block_ids[int(intact.argmin())]

    def read_block(self, block_id: int) -> Bytes:
        """A block's bytes, ``[L·2·K, S, H bytes]``."""
        block: Bytes = self._bytes[block_id]
        return block

    def fill(
        self, block_ids: Sequence[int], token_ids: Sequence[int], positions: range, salt: str, layer: int | None = None
    ) -> None:
        """Compute the KV of ``positions``, of one layer or of all."""
        rows = slice(None) if layer is None else slice(layer * self._num_rows, (layer + 1) * self._num_rows)
        for position in positions:
            block, slot = block_ids[position // self._size], position % self._size
            self._bytes[block, rows, slot] = self._content.get_token(token_ids, position, salt)[rows]

    def find_wrong(self, block_ids: Sequence[int], token_ids: Sequence[int], positions: range, salt: str) -> int | None:
        """The first of ``positions`` whose bytes are not what the model computes."""
        for position in positions:
            found = self._get_slot(block_ids, position)
            if not (found == self._content.get_token(token_ids, position, salt)).all():
                return position
        return None

    def find_written(self, block_ids: Sequence[int], positions: range) -> int | None:
        """The first of ``positions`` that holds neither zeros nor the poison of this pool."""
        for position in positions:
            found = self._get_slot(block_ids, position)
            if not np.isin(found, (0, _UNCOMPUTED[self._role])).all():
                return position
        return None

    def explain_wrong(self, block_ids: Sequence[int], position: int, *, holds_blocks: bool) -> tuple[str, str] | None:
        """Where wrong bytes come from, and the rule that it breaks; None when only the test knows.

        Args:
            block_ids: of the request.
            position: of the token.
            holds_blocks: the connector's producers hold blocks until they are fetched.
        """
        rows = self._get_slot(block_ids, position)
        for row in rows.reshape(-1, rows.shape[-1]):
            value = int(row[0])
            if not (row == value).all():
                continue
            if value == _UNCOMPUTED[self._role]:
                return "R4", "it was never filled"
            if value in (Poison.UNCOMPUTED_PREFILL, Poison.UNCOMPUTED_DECODE):
                return "R7", "it was never computed"
            if value in (Poison.FREED_PREFILL, Poison.FREED_DECODE):
                return "R10" if holds_blocks else "R8", "it was read from a block that was free already"
        return None

    def _get_slot(self, block_ids: Sequence[int], position: int) -> Bytes:
        slot: Bytes = self._bytes[block_ids[position // self._size], :, position % self._size]
        return slot
