"""The shape of KV memory and the identity of a block, shared by the engine, the connectors and the wire.

KV memory is block-major: one tensor ``[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]``
(index 0 of the third axis holds keys, 1 values). A block is one contiguous span of ``block_bytes``.

A block's identity is a chain hash over (parent, the block's token ids, extra keys). Its root is the model
fingerprint, so two models, dtypes, layouts, block sizes, numerics, adapters or cache salts never share a
block. It is stable across processes and machines.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

LAYOUT_VERSION = 1
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
DIGEST_BYTES = 16


class KVCacheSpec(msgspec.Struct, frozen=True):
    """Shape of one block.

    Attributes:
        num_layers: L, layers that keep KV.
        num_kv_heads: K, KV heads kept in this memory (a tensor-parallel rank's share).
        head_dim: H.
        block_size: S, tokens in a block.
        dtype: ``bfloat16`` or ``float32``.
        layout_version: changes when the order of the bytes changes.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    layout_version: int = LAYOUT_VERSION

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """``(L, 2, K, S, H)``."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of KV that one token takes over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: one contiguous span."""
        return self.token_bytes * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens occupy, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the model runners that share an engine's work: which heads and layers are its own.

    All ranks have the same block ids and token counts; each keeps its own share of every block.

    Attributes:
        tensor_parallel_rank: which share of each layer's heads.
        tensor_parallel_size: shares that the heads are cut into.
        pipeline_parallel_rank: which share of the layers.
        pipeline_parallel_size: shares that the layers are cut into.
    """

    tensor_parallel_rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_rank: int = 0
    pipeline_parallel_size: int = 1

    @property
    def size(self) -> int:
        """Ranks of the engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def index(self) -> int:
        """This one's place among all, from 0: the ranks of a pipeline stage follow each other."""
        return self.pipeline_parallel_rank * self.tensor_parallel_size + self.tensor_parallel_rank

    @property
    def all_ranks(self) -> list[Rank]:
        """The engine's, in order, this one among them."""
        return [
            Rank(tensor, self.tensor_parallel_size, pipeline, self.pipeline_parallel_size)
            for pipeline in range(self.pipeline_parallel_size)
            for tensor in range(self.tensor_parallel_size)
        ]

    @property
    def label(self) -> str:
        """For the names of its shares, like ``tp0of3-pp1of2``; empty for the only rank of an engine."""
        if self.size == 1:
            return ""
        tensor_parallel = f"tp{self.tensor_parallel_rank}of{self.tensor_parallel_size}"
        return f"{tensor_parallel}-pp{self.pipeline_parallel_rank}of{self.pipeline_parallel_size}"


class ModelIdentity(msgspec.Struct, frozen=True):
    """Everything that decides the bytes of a KV block besides the tokens.

    Attributes:
        weights: hex digest of the weights' content.
        architecture: hex digest of the architecture and rope settings.
        compute_dtype: dtype of activations and weights in the forward pass.
        numerics: the kernels' numerics class; two classes may round differently.
        kv: the block's shape and dtype, over all ranks.
        tensor_parallel_size: ranks that share each layer's heads.
        pipeline_parallel_size: ranks that share the layers. Engines of other sizes cut a block into other pieces, which
            are no use to each other.
    """

    weights: str
    architecture: str
    compute_dtype: str
    numerics: str
    kv: KVCacheSpec
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1

    @property
    def fingerprint(self) -> str:
        """Hex digest over all parts; the root of every block's identity."""
        return hashlib.sha256(msgspec.json.encode(self, order="sorted")).hexdigest()[: 2 * DIGEST_BYTES]

    def explain_difference(self, other: ModelIdentity) -> str:
        """The parts in which ``other`` differs from this one, for people; empty when equal."""
        mine, theirs = _flatten(self), _flatten(other)
        return ", ".join(f"{k} {mine[k]} here, {theirs[k]} there" for k in mine if mine[k] != theirs[k])


def _flatten(identity: ModelIdentity) -> dict[str, object]:
    parts = msgspec.structs.asdict(identity)
    del parts["kv"]
    parts.update({f"kv.{name}": value for name, value in msgspec.structs.asdict(identity.kv).items()})
    return parts


@dataclass(frozen=True, slots=True)
class BlockKey:
    """Identity of a block's content: chain digest, and the tokens it holds (fewer than S in a partial block)."""

    digest: bytes
    num_tokens: int

    @property
    def hex(self) -> str:
        """The digest as text, for file names and keys of stores."""
        return self.digest.hex()


class BlockHasher:
    """Chain hasher for one model, adapter and salt.

    Args:
        fingerprint: the model fingerprint, the root of the chain.
        cache_salt: blocks with different salts never meet.
        adapter: id and version of the adapter, ``""`` for none.
    """

    def __init__(self, fingerprint: str, *, cache_salt: str = "", adapter: str = "") -> None:
        root = msgspec.json.encode([fingerprint, cache_salt, adapter])
        self.root = hashlib.sha256(root).digest()[:DIGEST_BYTES]

    @staticmethod
    def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
        """Digest of a block whose prefix has digest ``parent`` and which holds ``token_ids``.

        The number of tokens is part of what is hashed: a partial block never equals a full one.
        """
        payload = array("I", token_ids).tobytes()
        return hashlib.sha256(parent + len(token_ids).to_bytes(4, "little") + payload).digest()[:DIGEST_BYTES]

    def block_keys(self, token_ids: Sequence[int], block_size: int) -> list[BlockKey]:
        """Keys of all blocks of ``token_ids`` in order; the last one may be partial."""
        keys: list[BlockKey] = []
        parent = self.root
        for start in range(0, len(token_ids), block_size):
            tokens = token_ids[start : start + block_size]
            parent = self.hash_block(parent, tokens)
            keys.append(BlockKey(parent, len(tokens)))
        return keys
