"""Loading a Hugging Face directory into a `CausalLM`: tensors merged, checked and prepared one by one.

At most one plain tensor stands beside the prepared weights at any time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pdserve.checkpoint import weight_files
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.llama import CausalLM, ModelWeights
from pdserve.engine.models.weights import WeightReader
from pdserve.kernels.base import KernelBackend, LinearWeight
from pdserve.kernels.decoder import LayerWeights

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


def load_model(directory: Path, dtype: torch.dtype, backend: KernelBackend) -> CausalLM:
    """Load the model in ``directory``.

    Args:
        directory: ``config.json`` and safetensors files.
        dtype: of the weights in memory, the backend's.
        backend: the kernels to compute with.

    Raises:
        ConfigError: the model is not supported, or a tensor is missing, unknown or of the wrong shape; it is named.
    """
    assert dtype == backend.dtype
    config = ModelConfig.from_directory(directory)
    with WeightReader(weight_files(directory)) as reader:
        weights = _Loader(config, dtype, backend, reader).load()
        reader.require_all_read()
    return CausalLM(config, weights, backend)


class _Loader:
    def __init__(self, config: ModelConfig, dtype: torch.dtype, backend: KernelBackend, reader: WeightReader) -> None:
        self._config = config
        self._dtype = dtype
        self._backend = backend
        self._reader = reader

    def load(self) -> ModelWeights:
        config = self._config
        layers = tuple(self._load_layer(f"model.layers.{index}.") for index in range(config.num_layers))
        final_norm = self._vector("model.norm.weight", config.hidden_size)
        table = self._vector(EMBEDDING, config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            self._reader.ignore(LM_HEAD)
            lm_head = self._backend.prepare_linear(table, None)
            embedding = self._backend.prepare_embedding(table, lm_head)
        else:
            embedding = self._backend.prepare_embedding(table, None)
            del table
            lm_head = self._linear(("lm_head",), (config.vocab_size,), config.hidden_size, has_bias=False)
        return ModelWeights(embedding, layers, final_norm, lm_head)

    def _load_layer(self, prefix: str) -> LayerWeights:
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        qkv = tuple(f"{attention}{part}_proj" for part in "qkv")
        gate_up = (f"{mlp}gate_proj", f"{mlp}up_proj")
        return LayerWeights(
            input_norm=self._vector(f"{prefix}input_layernorm.weight", hidden),
            qkv=self._linear(qkv, (q_size, kv_size, kv_size), hidden, has_bias=config.qkv_bias),
            q_norm=self._vector(f"{attention}q_norm.weight", config.head_dim) if config.qk_norm else None,
            k_norm=self._vector(f"{attention}k_norm.weight", config.head_dim) if config.qk_norm else None,
            output=self._linear((f"{attention}o_proj",), (hidden,), q_size, has_bias=config.output_bias),
            post_attention_norm=self._vector(f"{prefix}post_attention_layernorm.weight", hidden),
            gate_up=self._linear(gate_up, (inner, inner), hidden, has_bias=config.mlp_bias),
            down=self._linear((f"{mlp}down_proj",), (hidden,), inner, has_bias=config.mlp_bias),
        )

    def _vector(self, name: str, *shape: int) -> Tensor:
        """Tensor ``name`` as it is."""
        target = torch.empty(shape, dtype=self._dtype, device=self._backend.device)
        self._reader.read_into(name, target)
        return target

    def _linear(
        self, names: Sequence[str], out_features: Sequence[int], in_features: int, *, has_bias: bool
    ) -> LinearWeight:
        """The projections ``names`` stacked into one, prepared by the backend."""
        device = self._backend.device
        weight = torch.empty((sum(out_features), in_features), dtype=self._dtype, device=device)
        bias = torch.empty(sum(out_features), dtype=self._dtype, device=device) if has_bias else None
        for name, rows in zip(names, torch.split(weight, list(out_features)), strict=True):
            self._reader.read_into(f"{name}.weight", rows)
        if bias is not None:
            for name, part in zip(names, torch.split(bias, list(out_features)), strict=True):
                self._reader.read_into(f"{name}.bias", part)
        return self._backend.prepare_linear(weight, bias)
