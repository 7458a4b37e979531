"""A model's two ends in the C++ library: what is looked up for each token, and each row's likeliest token."""

from __future__ import annotations

import ctypes
from ctypes import byref

import torch
from torch import Tensor

from pdserve.kernels.base import LinearWeight, Rotation, Tables
from pdserve.kernels.linear_format import build_linear
from pdserve.kernels.native_library import NativeTables, require_done


def look_up(
    library: ctypes.CDLL, tables: Tables, token_ids_T: Tensor, positions_T: Tensor, num_threads: int
) -> tuple[Tensor, Rotation]:
    """See `pdserve.kernels.base.KernelBackend.look_up`.

    Raises:
        IndexError: a token id or position lies outside the tables.
    """
    num_tokens, embedding, rotation = len(token_ids_T), tables.embedding, tables.rotation
    assert embedding.data.dtype == torch.bfloat16
    for ids_T in (token_ids_T, positions_T):
        assert ids_T.dtype == torch.int64
        assert ids_T.is_contiguous()
        assert len(ids_T) == num_tokens
    for table_PH in (rotation.cos_TH, rotation.sin_TH):
        assert table_PH.dtype == torch.float32
        assert table_PH.is_contiguous()
    num_positions, head_dim = rotation.cos_TH.shape
    native = NativeTables(
        build_linear(embedding), rotation.cos_TH.data_ptr(), rotation.sin_TH.data_ptr(), num_positions, head_dim
    )
    embedded_TD = torch.empty(num_tokens, embedding.in_features, dtype=torch.bfloat16)
    cos_TH, sin_TH = (torch.empty(num_tokens, head_dim, dtype=torch.float32) for _ in range(2))
    status = library.pds_look_up(
        byref(native),
        token_ids_T.data_ptr(),
        positions_T.data_ptr(),
        num_tokens,
        embedded_TD.data_ptr(),
        cos_TH.data_ptr(),
        sin_TH.data_ptr(),
        num_threads,
    )
    require_done(status)
    return embedded_TD, Rotation(cos_TH, sin_TH)


def find_largest(library: ctypes.CDLL, x_TD: Tensor, weight: LinearWeight, num_threads: int) -> tuple[Tensor, Tensor]:
    """See `pdserve.kernels.base.KernelBackend.linear_argmax`."""
    assert x_TD.dtype == torch.bfloat16
    assert x_TD.stride(1) == 1
    assert x_TD.shape[1] == weight.in_features
    num_rows = x_TD.shape[0]
    indices_T, values_T = torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows, dtype=torch.float32)
    status = library.pds_linear_argmax(
        x_TD.data_ptr(),
        x_TD.stride(0),
        num_rows,
        byref(build_linear(weight)),
        indices_T.data_ptr(),
        values_T.data_ptr(),
        num_threads,
    )
    require_done(status)
    return indices_T, values_T
