"""What LMCache wants from whoever uses it: names for what is stored, and copies from and to its memory.

An LMCache token is a block here, its id the block's digest as a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.token_database import TokenDatabase

from pdserve.connectors.lmcache.retrieval import Retrieval, copy_bytes
from pdserve.kv_layout import Rank

DTYPE = torch.uint8


class DigestDatabase(TokenDatabase):
    """Makes LMCache keys of digests, each by itself: no hash of LMCache's is involved.

    Args:
        model_name: in front of every key.
        rank: whose shares of blocks; LMCache calls it a worker, of a world.
    """

    def __init__(self, model_name: str, rank: Rank) -> None:
        self._model_name = model_name
        self._rank = rank

    def build_key(self, digest: bytes) -> CacheEngineKey:
        """LMCache's key of a block."""
        return self._build_key(int.from_bytes(digest))

    def process_tokens(
        self, tokens: Sequence[int] | None = None, *args: object, **kwargs: object
    ) -> Iterator[tuple[int, int, CacheEngineKey]]:
        """A key for each digest; LMCache passes what else it knows, and none of it matters here."""
        for index, digest in enumerate(tokens or ()):
            yield index, index + 1, self._build_key(digest)

    def _build_key(self, digest: int) -> CacheEngineKey:
        return CacheEngineKey(
            self._model_name,
            world_size=self._rank.size,
            worker_id=self._rank.index,
            chunk_hash=digest,
            dtype=DTYPE,
            request_configs=None,
        )


class BlockCopier(GPUConnectorInterface):
    """Copies values from and to LMCache's memory. Holds no state: a call brings what it is about.

    Args:
        value_bytes: size of a value.
    """

    def __init__(self, value_bytes: int) -> None:
        self._value_bytes = value_bytes

    def get_shape(self, num_tokens: int) -> torch.Size:
        """LMCache's order: keys and values, layers, tokens, what a token takes."""
        return torch.Size((2, 1, num_tokens, self._value_bytes // 2))

    def from_gpu(self, memory_obj: MemoryObj, start: int, end: int, *, value: memoryview) -> None:
        """A value into LMCache's memory."""
        copy_bytes(value, _get_bytes(memory_obj))

    def to_gpu(self, memory_obj: MemoryObj, start: int, end: int, *, retrieval: Retrieval, **kwargs: object) -> None:
        """A value out of it."""
        retrieval.put(start, _get_bytes(memory_obj))

    def batched_from_gpu(
        self, memory_objs: Iterable[MemoryObj], starts: Iterable[int], ends: Iterable[int], **kwargs: memoryview
    ) -> None:
        """Values into LMCache's memory."""
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory_obj, start, end, **kwargs)

    def batched_to_gpu(
        self, memory_objs: Iterable[MemoryObj], starts: Iterable[int], ends: Iterable[int], **kwargs: Retrieval
    ) -> None:
        """Values out of it."""
        for memory_obj, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory_obj, start, end, **kwargs)


def _get_bytes(memory_obj: MemoryObj) -> memoryview:
    return memoryview(memory_obj.byte_array).cast("B")
