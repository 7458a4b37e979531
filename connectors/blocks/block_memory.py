"""KV memory as bytes, a row for each block."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from pdserve.errors import ConfigError
from pdserve.kv_layout import DTYPE_BYTES, KVCacheSpec


class BlockMemory:
    """The pool's blocks as rows of bytes, sharing the tensor's memory.

    Args:
        kv_cache: ``[B, L, 2, K, S, H]``, contiguous, in CPU memory.
        spec: shape of a block.
        connector: who says so when the memory does not fit.

    Raises:
        ConfigError: the tensor is elsewhere or has another shape than ``spec`` says.
    """

    def __init__(self, kv_cache: torch.Tensor, spec: KVCacheSpec, connector: str) -> None:
        if kv_cache.device.type != "cpu":
            raise ConfigError(
                f"connector {connector} moves CPU memory; the KV cache is on {kv_cache.device}: use another one"
            )
        shape = tuple(kv_cache.shape[1:])
        if shape != spec.block_shape or not kv_cache.is_contiguous():
            raise ConfigError(
                f"connector {connector}: KV cache has blocks of shape {shape}, expected {spec.block_shape}"
            )
        rows = kv_cache.reshape(kv_cache.shape[0], -1).view(torch.uint8).numpy()
        self._rows: npt.NDArray[np.uint8] = rows
        self._bytes: memoryview = rows.reshape(-1).data
        self._block_bytes = spec.block_bytes
        self._by_token = (-1, spec.block_size, spec.head_dim * DTYPE_BYTES[spec.dtype])
        self._block_size = spec.block_size
        self._layer_bytes = spec.block_bytes // spec.num_layers
        self._num_layers = spec.num_layers

    def get_view(self, block_id: int) -> memoryview:
        """The block's bytes, writable."""
        row: npt.NDArray[np.uint8] = self._rows[block_id]
        return row.data

    def copy_out(self, block_id: int, num_tokens: int, target: memoryview) -> None:
        """Copy a block, with zeros in the slots behind ``num_tokens``: what others left there stays here."""
        self.copy_layers_out(block_id, num_tokens, 0, self._num_layers, target)

    def copy_layers_out(self, block_id: int, num_tokens: int, start: int, end: int, target: memoryview) -> None:
        """`copy_out` of layers ``start`` to ``end`` alone, to their place in ``target``, which holds a whole block.

        It keeps the interpreter's lock, for the tens of microseconds that a block takes: getting it back from a busy
        writer takes longer.
        """
        first, last = start * self._layer_bytes, end * self._layer_bytes
        offset = block_id * self._block_bytes
        target[first:last] = self._bytes[offset + first : offset + last]
        if num_tokens < self._block_size:
            per_token = np.frombuffer(target[first:last], dtype=np.uint8).reshape(self._by_token)
            per_token[:, num_tokens:] = 0

    def wipe(self, block_id: int) -> None:
        """Zero a block that unverified bytes were read into.

        Kernels multiply slots behind a sequence's end by zero; a stray NaN would survive that.
        """
        self._rows[block_id].fill(0)
