"""Loading a Hugging Face directory into a model, or one rank's share of it.

Tensors are merged, checked and prepared one by one: at most one plain tensor stands beside the prepared weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from pdserve.checkpoint import weight_files
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.llama import CausalLM, ModelWeights
from pdserve.engine.models.shard import Shard, check_sizes
from pdserve.engine.models.sharded_lm import RankGroup, ShardedLM, ShardWeights
from pdserve.engine.models.weights import WeightReader
from pdserve.kernels.base import KernelBackend, LinearWeight
from pdserve.kernels.decoder import LayerWeights
from pdserve.kv_layout import Rank

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
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
    config = ModelConfig.from_directory(directory)
    with _open_loader(directory, Shard(config, Rank()), dtype, backend) as loader:
        weights = loader.load()
    return CausalLM(config, weights, backend)


def load_shard(directory: Path, dtype: torch.dtype, backend: KernelBackend, group: RankGroup) -> ShardedLM:
    """Load one rank's share of the model in ``directory``; only that share is read.

    Args:
        directory: as for `load_model`.
        dtype: as for `load_model`.
        backend: as for `load_model`.
        group: the rank among the others.

    Raises:
        ConfigError: as `load_model`, or the model cannot be cut like that.
    """
    shard = Shard(ModelConfig.from_directory(directory), group.rank)
    check_sizes(shard.config, group.rank.tensor_parallel_size, group.rank.pipeline_parallel_size)
    with _open_loader(directory, shard, dtype, backend) as loader:
        weights = loader.load_share()
    return ShardedLM(shard, weights, backend, group)


@contextmanager
def _open_loader(directory: Path, shard: Shard, dtype: torch.dtype, backend: KernelBackend) -> Iterator[_Loader]:
    """A loader that has to read all that the files hold of ``shard``."""
    assert dtype == backend.dtype
    with WeightReader(weight_files(directory)) as reader:
        yield _Loader(shard, dtype, backend, reader)
        reader.require_all_read()


class _Loader:
    def __init__(self, shard: Shard, dtype: torch.dtype, backend: KernelBackend, reader: WeightReader) -> None:
        self._shard = shard
        self._config = shard.config
        self._dtype = dtype
        self._backend = backend
        self._reader = reader

    def load(self) -> ModelWeights:
        """All of the model."""
        config = self._config
        layers = self._load_layers()
        final_norm = self._load_final_norm()
        table = self._vector(EMBEDDING, config.vocab_size, config.hidden_size)
        if config.tie_word_embeddings:
            self._reader.ignore(LM_HEAD)
            lm_head = self._backend.prepare_linear(table, None)
            embedding = self._backend.prepare_embedding(table, lm_head)
        else:
            embedding = self._backend.prepare_embedding(table, None)
            del table
            lm_head = self._load_lm_head("lm_head")
        return ModelWeights(embedding, layers, final_norm, lm_head)

    def load_share(self) -> ShardWeights:
        """What the rank holds. The embedding is whole in each rank of the first stage, where it is no product."""
        config, shard = self._config, self._shard
        for layer in set(range(config.num_layers)) - set(shard.layers):
            self._reader.ignore(f"model.layers.{layer}.")
        for name in (EMBEDDING, FINAL_NORM, LM_HEAD):
            self._reader.ignore(name)
        embedding = final_norm = lm_head = None
        layers = self._load_layers()
        if shard.is_first_stage:
            table = self._vector(EMBEDDING, config.vocab_size, config.hidden_size)
            embedding = self._backend.prepare_embedding(table, None)
        if shard.is_last_stage:
            final_norm = self._load_final_norm()
            lm_head = self._load_lm_head("model.embed_tokens" if config.tie_word_embeddings else "lm_head")
        return ShardWeights(embedding, layers, final_norm, lm_head)

    def _load_final_norm(self) -> Tensor:
        return self._vector(FINAL_NORM, self._config.hidden_size)

    def _load_lm_head(self, name: str) -> LinearWeight:
        return self._linear((name,), (self._config.vocab_size,), self._config.hidden_size, has_bias=False)

    def _load_layers(self) -> tuple[LayerWeights, ...]:
        return tuple(self._load_layer(f"model.layers.{index}.") for index in self._shard.layers)

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
        """The rank's outputs of the projections ``names``, stacked into one, prepared by the backend."""
        device, rank = self._backend.device, self._shard.rank
        sizes = [count // rank.tensor_parallel_size for count in out_features]
        weight = torch.empty((sum(sizes), in_features), dtype=self._dtype, device=device)
        bias = torch.empty(sum(sizes), dtype=self._dtype, device=device) if has_bias else None
        for name, rows in zip(names, torch.split(weight, sizes), strict=True):
            self._read_share(f"{name}.weight", rows)
        if bias is not None:
            for name, part in zip(names, torch.split(bias, sizes), strict=True):
                self._read_share(f"{name}.bias", part)
        return self._backend.prepare_linear(weight, bias)

    def _read_share(self, name: str, target: Tensor) -> None:
        rank = self._shard.rank
        self._reader.read_into(name, target, part=rank.tensor_parallel_rank, num_parts=rank.tensor_parallel_size)
