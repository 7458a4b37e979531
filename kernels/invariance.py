"""A quick check, on a model's own weights, that results don't depend on what else is computed.

The promise rests on properties of the machine's matrix libraries that no interface guarantees, so it is looked at
where it is used: each linear layer, the norm, the nonlinearity and attention, with a few rows and with many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from pdserve.kernels.base import AttentionMetadata, KernelBackend, LinearWeight

ROW_SLICES = ((1, 0), (1, 37), (2, 5), (3, 1), (7, 30), (17, 2))
"""Number of rows and first row; what of a batch is computed again on its own."""
MAX_ROWS = 40
CONTEXT_TOKENS = 150
BLOCK_SIZE = 16
_SEED = 20250917


@dataclass(frozen=True)
class KernelShapes:
    """What a model asks of its kernels: its distinct linear layers, a norm's weight [D], and sizes N, K, H and I."""

    linears: tuple[LinearWeight, ...]
    norm: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int


class KernelUser(Protocol):
    """A model, as far as this check needs it."""

    @property
    def backend(self) -> KernelBackend:
        """Its kernels."""
        ...

    def get_kernel_shapes(self) -> KernelShapes:
        """Its linear layers and shapes."""
        ...


@torch.inference_mode()
def check_invariance(model: KernelUser, block_size: int = BLOCK_SIZE) -> bool:
    """Whether the model's kernels give each row the same bits alone, among others, and in any chunking.

    Args:
        model: a loaded model. Takes some ten milliseconds for 135 million parameters on one core.
        block_size: of the KV memory that it will run on.
    """
    backend, shapes = model.backend, model.get_kernel_shapes()
    generator = torch.Generator().manual_seed(_SEED)
    functions: list[tuple[Callable[[Tensor], Tensor], int]] = [
        (partial(backend.linear, weight=weight), weight.in_features) for weight in shapes.linears
    ]
    functions.append((partial(backend.rms_norm, weight=shapes.norm, eps=1e-6), shapes.norm.shape[0]))
    functions.append((backend.silu_mul, 2 * shapes.intermediate_size))
    return all(
        _rows_are_independent(function, width, backend, generator) for function, width in functions
    ) and _attention_is_independent(backend, shapes, block_size, generator)


def _rows_are_independent(
    function: Callable[[Tensor], Tensor], width: int, backend: KernelBackend, generator: torch.Generator
) -> bool:
    rows = torch.randn(MAX_ROWS, width, generator=generator).to(backend.device, backend.dtype)
    whole = function(rows)
    return all(
        torch.equal(function(rows[first : first + count]), whole[first : first + count]) for count, first in ROW_SLICES
    )


def _attention_is_independent(
    backend: KernelBackend, shapes: KernelShapes, block_size: int, generator: torch.Generator
) -> bool:
    """One request's tokens: all in one step, against its last ones in steps of 1 and 2, alone and beside others."""
    num_blocks = -(-CONTEXT_TOKENS // block_size)
    kv_shape = (num_blocks, 1, 2, shapes.num_kv_heads, block_size, shapes.head_dim)
    kv_cache = torch.randn(kv_shape, generator=generator).to(backend.device, backend.dtype)
    q_shape = (CONTEXT_TOKENS, shapes.num_heads, shapes.head_dim)
    q_TNH = torch.randn(q_shape, generator=generator).to(backend.device, backend.dtype)

    def attend(query_lens: list[int], seq_lens: list[int]) -> Tensor:
        blocks = [list(range(num_blocks))] * len(seq_lens)
        metadata = AttentionMetadata.build(query_lens, seq_lens, blocks, block_size)
        plan = backend.build_plan(metadata, kv_cache, shapes.num_heads, shapes.head_dim**-0.5)
        return plan.attend(q_TNH[metadata.positions], kv_cache[:, 0])

    whole = attend([CONTEXT_TOKENS], [CONTEXT_TOKENS])
    last = CONTEXT_TOKENS - 1
    alone = attend([1], [CONTEXT_TOKENS])
    among = attend([1, 1, 1, 2], [100, CONTEXT_TOKENS, 7, CONTEXT_TOKENS])
    return (
        torch.equal(alone, whole[last:])
        and torch.equal(among[[0, 1, 2]], whole[[99, last, 6]])
        and torch.equal(among[3:], whole[last - 1 :])
    )
