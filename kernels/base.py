"""The interface between models and kernels: a step's description, and what a backend computes with it.

Tensor legend: T packed tokens of a step, R requests, B blocks in the pool, S block size, M max blocks of a
request, N query heads, K KV heads, H head dim, D model dim, I feed-forward dim, O output dim of a linear.

What every backend promises: a row of a result depends on that row's inputs alone. Not on the other rows, not on
how many there are, not on how a prompt was cut into steps, not on which blocks hold its KV, not on the number
of compute threads. Memory of the KV pool behind a request's last token may hold anything, NaN included.

This module knows neither models nor schedulers; a backend knows no weights but those it is handed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """One step: which tokens run, where their KV goes and which context they see.

    Holds what a step is made of; what follows from it is derived when it is asked for.

    Attributes:
        block_size: S.
        query_start_loc_array: R + 1 offsets into the packed tokens; request r owns ``[loc[r], loc[r + 1])``.
        seq_lens_array: R context lengths, this step's tokens included.
        block_table_array: [R, M] block ids of each request; behind its context, any block of the pool.

    The arrays are int64 and contiguous.
    """

    block_size: int
    query_start_loc_array: NDArray[np.int64]
    seq_lens_array: NDArray[np.int64]
    block_table_array: NDArray[np.int64]

    @cached_property
    def query_start_loc(self) -> tuple[int, ...]:
        """``query_start_loc_array`` as plain numbers, for those who go through requests one by one."""
        return tuple(self.query_start_loc_array.tolist())

    @cached_property
    def seq_lens(self) -> tuple[int, ...]:
        """``seq_lens_array`` as plain numbers."""
        return tuple(self.seq_lens_array.tolist())

    @cached_property
    def positions(self) -> Tensor:
        """[T] int64, each token's position in its request."""
        if self._is_token_each:
            return torch.from_numpy(self.seq_lens_array - 1)
        starts = self.query_start_loc_array
        request_T = np.repeat(np.arange(len(self.seq_lens_array)), np.diff(starts))
        return torch.from_numpy(np.arange(starts[-1]) + (self.seq_lens_array - starts[1:])[request_T])

    @cached_property
    def slot_mapping(self) -> Tensor:
        """[T] int64, ``block id * S + offset`` where each token's KV goes."""
        request_T = np.arange(len(self.seq_lens_array))
        if not self._is_token_each:
            request_T = np.repeat(request_T, np.diff(self.query_start_loc_array))
        block_T, offset_T = np.divmod(self.positions.numpy(), self.block_size)
        return torch.from_numpy(self.block_table_array[request_T, block_T] * self.block_size + offset_T)

    @cached_property
    def block_table(self) -> Tensor:
        """``block_table_array`` as a tensor."""
        return torch.from_numpy(self.block_table_array)

    @property
    def _is_token_each(self) -> bool:
        return len(self.seq_lens_array) == int(self.query_start_loc_array[-1])

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_ids: Sequence[Sequence[int]],
        block_size: int,
    ) -> AttentionMetadata:
        """Describe a step from plain lists, all R long.

        Args:
            query_lens: tokens of each request in this step, at least 1; they are its last ones.
            seq_lens: context length of each request, this step's tokens included.
            block_ids: each request's blocks in order; enough for its context, more are ignored.
            block_size: S.
        """
        num_blocks = [-(-length // block_size) for length in seq_lens]
        table = np.zeros((len(query_lens), max(num_blocks, default=0)), dtype=np.int64)
        for row, ids, count in zip(table, block_ids, num_blocks, strict=True):
            row[:count] = ids[:count]
        query_lens_R, seq_lens_R = (np.asarray(lengths, dtype=np.int64) for lengths in (query_lens, seq_lens))
        return cls.from_table(query_lens_R, seq_lens_R, table, block_size)

    @classmethod
    def from_table(
        cls,
        query_lens_R: NDArray[np.int64],
        seq_lens_R: NDArray[np.int64],
        block_table_RM: NDArray[np.int64],
        block_size: int,
    ) -> AttentionMetadata:
        """The same from arrays.

        Args:
            query_lens_R: tokens of each request in this step, at least 1; they are its last ones.
            seq_lens_R: context length of each request, this step's tokens included.
            block_table_RM: each request's blocks in order; what lies behind its context is any block of the pool.
            block_size: S.
        """
        starts = np.zeros(len(query_lens_R) + 1, dtype=np.int64)
        np.cumsum(query_lens_R, out=starts[1:])
        return cls(block_size, starts, seq_lens_R, block_table_RM)


@dataclass(frozen=True)
class LinearWeight:
    """A linear layer's weight in the form its backend computes with.

    Attributes:
        data: the weight; only the backend that made it knows its layout.
        bias: [O], or None.
        in_features: D.
        out_features: O.
        scales: float32, one for each output, in a layout like ``data``'s; None for weights that are not quantised.
    """

    data: Tensor
    bias: Tensor | None
    in_features: int
    out_features: int
    scales: Tensor | None = None


@dataclass(frozen=True)
class Rotation:
    """Rotary embedding of a step's tokens: ``x * cos + swap_halves(x) * sin``.

    Attributes:
        cos_TH: [T, H] float32, both halves.
        sin_TH: [T, H] float32, the first half negated.
    """

    cos_TH: Tensor
    sin_TH: Tensor

    def select(self, rows_T: Tensor) -> Rotation:
        """These rows only: the rotation of tokens at positions [T] int64, out of a table of all positions."""
        return Rotation(self.cos_TH.index_select(0, rows_T), self.sin_TH.index_select(0, rows_T))


@dataclass(frozen=True)
class Tables:
    """What a model looks up for each token.

    Attributes:
        embedding: [V, D], as `KernelBackend.prepare_embedding` made it: V outputs of D inputs.
        rotation: of every position of the model's context.
    """

    embedding: LinearWeight
    rotation: Rotation


class AttentionPlan(Protocol):
    """What a backend derived from one step's metadata, used for every layer of that step, in order."""

    def rotate_and_store(
        self, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, rotation: Rotation, kv_layer: Tensor
    ) -> Tensor:
        """Rotate queries and keys; write keys and values to their slots of ``kv_layer`` in its own dtype.

        Args:
            q_TNH: queries of the step's tokens.
            k_TKH: keys.
            v_TKH: values.
            rotation: of the step's tokens.
            kv_layer: [B, 2, K, S, H], one layer of KV memory.

        Returns:
            The rotated queries, [T, N, H] in the backend's dtype.
        """
        ...

    def attend(self, q_TNH: Tensor, kv_layer: Tensor) -> Tensor:
        """Causal attention of the step's tokens over their requests' context.

        Args:
            q_TNH: [T, N, H] rotated queries, in the backend's dtype.
            kv_layer: [B, 2, K, S, H], one layer of KV memory; the step's own KV stands in it already.

        Returns:
            [T, N, H] in the backend's dtype.
        """
        ...


class KernelBackend(Protocol):
    """The kernels of a forward pass, for one dtype. Used by one thread."""

    @property
    def name(self) -> str:
        """The name the registry knows it by."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and activations."""
        ...

    @property
    def device(self) -> torch.device:
        """Where all tensors live that it is handed, those of an `AttentionMetadata` and token ids aside."""
        ...

    @property
    def numerics(self) -> str:
        """The numerics class: equal strings promise equal bits.

        Two backends, or two machines, whose results may differ in a bit have different strings.
        """
        ...

    def prepare_linear(self, weight_OD: Tensor, bias_O: Tensor | None) -> LinearWeight:
        """Bring a weight, once at load, into the form `linear` reads fastest. May keep the tensor itself."""
        ...

    def prepare_embedding(self, table_VD: Tensor, tied_head: LinearWeight | None) -> LinearWeight:
        """Bring the token embedding into the form that `look_up` reads. May keep the tensor itself.

        Args:
            table_VD: the embedding.
            tied_head: the same weights as `prepare_linear` made them, where the output head is the embedding: one
                copy may serve for both.
        """
        ...

    def look_up(self, tables: Tables, token_ids_T: Tensor, positions_T: Tensor) -> tuple[Tensor, Rotation]:
        """The embeddings [T, D] of tokens, exactly, and the rotation of their positions; both [T] int64."""
        ...

    def linear(self, x_TD: Tensor, weight: LinearWeight) -> Tensor:
        """``x @ weight.T + bias``: [T, O] in the backend's dtype."""
        ...

    def linear_float32(self, x_TD: Tensor, weight: LinearWeight, out_TO: Tensor | None = None) -> Tensor:
        """The same in float32, for logits: as exact as the backend has it, [T, O]; in ``out_TO`` if that is given."""
        ...

    def linear_argmax(self, x_TD: Tensor, weight: LinearWeight) -> tuple[Tensor, Tensor]:
        """Where each row of `linear_float32` is largest, the lowest index among equals, and that value.

        A NaN counts as the largest. Lets a backend search outputs as it makes them, without writing them all.

        Returns:
            Indices [T] int64 and values [T] float32.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last axis, computed in float32 (https://arxiv.org/abs/1910.07467)."""
        ...

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """Add ``x`` to ``residual`` in place and return the norm of the sum."""
        ...

    def build_plan(self, metadata: AttentionMetadata, kv_cache: Tensor, num_heads: int, scale: float) -> AttentionPlan:
        """Derive from a step's metadata what attention needs in every layer.

        Args:
            metadata: the step.
            kv_cache: [B, L, 2, K, S, H]; only its shape, strides and dtype matter here.
            num_heads: N.
            scale: what scores are multiplied by.
        """
        ...

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        """``silu(gate) * up`` where the last axis holds gate, then up: [T, I]."""
        ...
