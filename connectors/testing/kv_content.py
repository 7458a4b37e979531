"""The KV that a deterministic engine would compute: a function of the tokens up to each position.

Small models make quick tests: a block is a few hundred bytes, with the real layout.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pdserve.connectors.base import ConnectorContext
from pdserve.kv_layout import DTYPE_BYTES, KVCacheSpec, ModelIdentity, Rank
from pdserve.protocol import Role

TINY_SPEC = KVCacheSpec(num_layers=2, num_kv_heads=2, head_dim=4, block_size=4, dtype="bfloat16")

Bytes = npt.NDArray[np.uint8]


def build_context(
    role: Role,
    options: Mapping[str, Any],
    *,
    spec: KVCacheSpec = TINY_SPEC,
    weights: str = "weights-1",
    engine_id: str = "engine-1",
    parallel: tuple[int, int] = (1, 1),
) -> ConnectorContext:
    """A context for a connector under test; of several ranks, the first one's.

    Args:
        role: of the engine.
        options: the connector's own.
        spec: shape of a block, over all ranks.
        weights: digest of the weights; engines with different ones are different models.
        engine_id: unique for each engine.
        parallel: tensor-parallel and pipeline-parallel size; they divide the heads and the layers.
    """
    tensor_parallel_size, pipeline_parallel_size = parallel
    identity = ModelIdentity(
        weights=weights,
        architecture="tiny",
        compute_dtype=spec.dtype,
        numerics="exact",
        kv=spec,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
    )
    share = msgspec.structs.replace(
        spec,
        num_kv_heads=spec.num_kv_heads // tensor_parallel_size,
        num_layers=spec.num_layers // pipeline_parallel_size,
    )
    rank = Rank(0, tensor_parallel_size, 0, pipeline_parallel_size)
    return ConnectorContext(engine_id, role, identity, share, dict(options), rank)


class KVContent:
    """Expected bytes of blocks of one model.

    Args:
        fingerprint: the model's; another model has other KV for the same tokens.
        spec: shape of a block.
    """

    def __init__(self, fingerprint: str, spec: KVCacheSpec) -> None:
        self._fingerprint = fingerprint
        self._spec = spec
        self._token_shape = (spec.num_layers * 2 * spec.num_kv_heads, spec.head_dim * DTYPE_BYTES[spec.dtype])
        self._of_prefix = functools.cache(self._compute)

    def get_token(self, token_ids: Sequence[int], position: int, salt: str = "") -> Bytes:
        """KV of the token at ``position``, ``[L·2·K, H bytes]``: it depends on all tokens up to it."""
        return self._of_prefix(tuple(token_ids[: position + 1]), salt)

    def get_block(self, token_ids: Sequence[int], index: int, salt: str = "") -> Bytes:
        """Block ``index`` of a prompt, ``[L·2·K, S, H bytes]``, zeros behind the prompt's end."""
        size = self._spec.block_size
        block = np.zeros((self._token_shape[0], size, self._token_shape[1]), dtype=np.uint8)
        for slot in range(min(size, len(token_ids) - index * size)):
            block[:, slot] = self.get_token(token_ids, index * size + slot, salt)
        return block

    def _compute(self, prefix: tuple[int, ...], salt: str) -> Bytes:
        seed = hashlib.sha256(repr((self._fingerprint, salt, prefix)).encode()).digest()
        rng = np.random.default_rng(int.from_bytes(seed[:8], "little"))
        return rng.integers(1, 256, size=self._token_shape, dtype=np.uint8)
