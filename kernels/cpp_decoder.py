"""All layers of a model in one call of the C++ library: no Python and no allocation between its kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref

import torch
from torch import Tensor

from pdserve.kernels.base import AttentionMetadata, Rotation
from pdserve.kernels.cpp_step import build_heads, build_kv_layer, build_step, set_rotation
from pdserve.kernels.decoder import DecoderShape, LayerHook, LayerWeights
from pdserve.kernels.linear_format import build_linear
from pdserve.kernels.native_library import NativeDecoder, NativeLayer, require_done


class CppDecoder:
    """See `pdserve.kernels.decoder.FusedDecoder`.

    Args:
        library: of the backend that prepared the weights.
        layers: the weights.
        final_norm: [D].
        shape: of the attention.
        get_num_threads: asked at each step.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        layers: Sequence[LayerWeights],
        final_norm: Tensor,
        shape: DecoderShape,
        get_num_threads: Callable[[], int],
    ) -> None:
        self._library = library
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._get_num_threads = get_num_threads
        heads = build_heads(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.head_dim**-0.5)
        self._native_layers = (NativeLayer * len(layers))(*(_build_layer(layer) for layer in layers))
        self._native = NativeDecoder(
            self._native_layers,
            len(layers),
            _get_pointer(final_norm),
            heads,
            shape.rms_norm_eps,
            layers[0].qkv.in_features,
            layers[0].down.in_features,
        )
        self._workspace = torch.empty(0, dtype=torch.bfloat16)

    def forward(
        self,
        residual_TD: Tensor,
        metadata: AttentionMetadata,
        rotation: Rotation,
        kv_cache: Tensor,
        on_layer: LayerHook | None,
    ) -> Tensor:
        """See `pdserve.kernels.decoder.FusedDecoder.forward`."""
        native = self._native
        assert residual_TD.is_contiguous()
        assert residual_TD.dtype == torch.bfloat16
        assert residual_TD.shape == (metadata.query_start_loc_array[-1], native.hidden_size)
        assert kv_cache.shape[1] == native.num_layers
        assert kv_cache.shape[4] == metadata.block_size
        native_step = build_step(metadata, self._get_num_threads())
        set_rotation(native_step, rotation)
        kv_layer = build_kv_layer(kv_cache[:, 0])
        hidden_TD = torch.empty_like(residual_TD)
        self._reserve(residual_TD.shape[0])

        def run(first_stage: int, last_stage: int) -> None:
            status = self._library.pds_decode_layers(
                byref(native),
                byref(native_step),
                byref(kv_layer),
                kv_cache.stride(1),
                residual_TD.data_ptr(),
                hidden_TD.data_ptr(),
                self._workspace.data_ptr(),
                first_stage,
                last_stage,
            )
            require_done(status)

        if on_layer is None:
            run(0, 2 * len(self._layers))
            return hidden_TD
        for layer in range(len(self._layers)):
            on_layer.before_layer(layer)
            run(2 * layer, 2 * layer + 1)
            on_layer.after_layer(layer)
            run(2 * layer + 1, 2 * layer + 2)
        return hidden_TD

    def _reserve(self, num_tokens: int) -> None:
        """Make the workspace large enough; it stays as large as the largest step needed."""
        needed = self._library.pds_workspace_elements(byref(self._native), num_tokens)
        if self._workspace.shape[0] < needed:
            self._workspace = torch.empty(needed, dtype=torch.bfloat16)


def _build_layer(layer: LayerWeights) -> NativeLayer:
    return NativeLayer(
        _get_pointer(layer.input_norm),
        None if layer.q_norm is None else _get_pointer(layer.q_norm),
        None if layer.k_norm is None else _get_pointer(layer.k_norm),
        _get_pointer(layer.post_attention_norm),
        build_linear(layer.qkv),
        build_linear(layer.output),
        build_linear(layer.gate_up),
        build_linear(layer.down),
    )


def _get_pointer(norm: Tensor) -> int:
    assert norm.is_contiguous()
    assert norm.dtype == torch.bfloat16
    return norm.data_ptr()
