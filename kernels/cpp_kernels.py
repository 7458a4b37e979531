"""The compiled kernels one by one, as functions of tensors.

Each takes the instruction set's name and the number of threads last. The engine's own steps run all layers in one call
of the library instead (`cpp_decoder`).

Shapes and dtypes are checked here; the library trusts what it is given.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import byref

import torch
from torch import Tensor

from pdserve.kernels.base import LinearWeight, Rotation
from pdserve.kernels.cpp_step import CppStep, build_heads, build_kv_layer, set_rotation
from pdserve.kernels.linear_format import build_linear
from pdserve.kernels.native_library import NativeProjected, choose_variant, load_library, require_done


@functools.cache
def get_library(variant: str) -> ctypes.CDLL:
    """The library of a variant, by its name; loaded once.

    Raises:
        ConfigError: this processor does not run it, or it cannot be compiled.
    """
    return load_library(choose_variant(variant))


def linear(
    x_TD: Tensor,
    panels: Tensor,
    scales: Tensor | None,
    bias_O: Tensor | None,
    out_TO: Tensor,
    variant: str,
    num_threads: int,
) -> None:
    """``x @ weight.T + bias`` into ``out``: bfloat16, or float32 for the accumulators as they are.

    Args:
        x_TD: [T, D] bfloat16, rows of adjacent elements.
        panels: the weight as `CppBackend.prepare_linear` packed it.
        scales: of its outputs, where it is quantised.
        bias_O: [O] bfloat16, or None.
        out_TO: [T, O], contiguous.
        variant: instruction set.
        num_threads: compute threads.
    """
    weight = LinearWeight(panels, bias_O, x_TD.shape[1], out_TO.shape[1], scales)
    multiply(get_library(variant), x_TD, weight, out_TO, num_threads)


def multiply(library: ctypes.CDLL, x_TD: Tensor, weight: LinearWeight, out_TO: Tensor, num_threads: int) -> None:
    """`linear` with the library and the weight at hand."""
    assert x_TD.dtype == torch.bfloat16
    assert x_TD.stride(1) == 1
    assert x_TD.shape[1] == weight.in_features
    assert out_TO.is_contiguous()
    assert out_TO.shape == (x_TD.shape[0], weight.out_features)
    function = library.pds_linear if out_TO.dtype == torch.bfloat16 else library.pds_linear_float32
    native = byref(build_linear(weight))
    require_done(function(x_TD.data_ptr(), x_TD.stride(0), x_TD.shape[0], native, out_TO.data_ptr(), num_threads))


def rms_norm(x: Tensor, weight_D: Tensor, eps: float, variant: str, num_threads: int) -> Tensor:
    """Root-mean-square norm over the last axis of contiguous bfloat16 (https://arxiv.org/abs/1910.07467)."""
    _require_plain(x, weight_D)
    width = x.shape[-1]
    assert weight_D.shape == (width,)
    out = torch.empty_like(x)
    get_library(variant).pds_rms_norm(
        x.data_ptr(), x.numel() // width, width, weight_D.data_ptr(), eps, out.data_ptr(), num_threads
    )
    return out


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, variant: str, num_threads: int
) -> Tensor:
    """Add ``x`` to ``residual`` in place; the norm of the sum. All are contiguous bfloat16."""
    _require_plain(x_TD, residual_TD, weight_D)
    assert x_TD.shape == residual_TD.shape
    assert weight_D.shape == residual_TD.shape[1:]
    out = torch.empty_like(residual_TD)
    get_library(variant).pds_add_rms_norm(
        x_TD.data_ptr(),
        residual_TD.data_ptr(),
        *residual_TD.shape,
        weight_D.data_ptr(),
        eps,
        out.data_ptr(),
        num_threads,
    )
    return out


def silu_mul(gate_up_T2I: Tensor, variant: str, num_threads: int) -> Tensor:
    """``silu(gate) * up`` where the last axis of contiguous bfloat16 holds gate, then up: [T, I]."""
    _require_plain(gate_up_T2I)
    num_tokens, width = gate_up_T2I.shape[0], gate_up_T2I.shape[1] // 2
    out_TI = gate_up_T2I.new_empty(num_tokens, width)
    get_library(variant).pds_silu_mul(gate_up_T2I.data_ptr(), num_tokens, width, out_TI.data_ptr(), num_threads)
    return out_TI


def rotate_and_store(
    q_TNH: Tensor,
    k_TKH: Tensor,
    v_TKH: Tensor,
    rotation: list[Tensor],
    kv_layer: Tensor,
    step: list[Tensor],
    variant: str,
    num_threads: int,
) -> Tensor:
    """Rotate queries and keys, write keys and values to their slots; the rotated queries, [T, N, H].

    Args:
        q_TNH: [T, N, H] bfloat16; each token's heads side by side, as in ``k_TKH`` and ``v_TKH``.
        k_TKH: [T, K, H] bfloat16.
        v_TKH: [T, K, H] bfloat16.
        rotation: cos and sin, [T, H] float32; see `pdserve.kernels.base.Rotation`.
        kv_layer: [B, 2, K, S, H], one layer of KV memory.
        step: query_start_loc, seq_lens, block_table and slot_mapping, all int64; see `AttentionMetadata`.
        variant: instruction set.
        num_threads: compute threads.
    """
    num_tokens, num_heads, head_dim = q_TNH.shape
    assert q_TNH.dtype == k_TKH.dtype == v_TKH.dtype == torch.bfloat16
    assert k_TKH.shape == v_TKH.shape == (num_tokens, kv_layer.shape[2], head_dim)
    native = CppStep(*step).build_native(num_threads)
    set_rotation(native, Rotation(*rotation))
    projected = NativeProjected(
        q_TNH.data_ptr(), k_TKH.data_ptr(), v_TKH.data_ptr(), q_TNH.stride(0), k_TKH.stride(0), v_TKH.stride(0)
    )
    heads = build_heads(num_heads, k_TKH.shape[1], head_dim, 1.0)
    out_TNH = q_TNH.new_empty(q_TNH.shape)
    status = get_library(variant).pds_rotate_and_store(
        byref(projected), byref(native), byref(build_kv_layer(kv_layer)), byref(heads), out_TNH.data_ptr()
    )
    require_done(status)
    return out_TNH


def attend(q_TNH: Tensor, kv_layer: Tensor, step: list[Tensor], scale: float, variant: str, num_threads: int) -> Tensor:
    """Causal attention of a step's rotated queries, contiguous bfloat16, over their requests' context; [T, N, H].

    ``kv_layer`` and ``step`` are as in `rotate_and_store`, and ``scale`` is what scores are multiplied by.
    """
    _require_plain(q_TNH)
    num_tokens, num_heads, head_dim = q_TNH.shape
    heads = build_heads(num_heads, kv_layer.shape[2], head_dim, scale)
    native = CppStep(*step).build_native(num_threads)
    assert num_tokens == native.num_tokens
    out_TNH = torch.empty_like(q_TNH)
    status = get_library(variant).pds_attend(
        q_TNH.data_ptr(), byref(native), byref(build_kv_layer(kv_layer)), byref(heads), out_TNH.data_ptr()
    )
    require_done(status)
    return out_TNH


def _require_plain(*tensors: Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == torch.bfloat16
        assert tensor.is_contiguous()
