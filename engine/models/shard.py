"""Which part of a model one rank holds: a share of each product's outputs, and the layers of its pipeline stage.

Every product is cut by outputs, none by inputs: a rank computes whole sums, in the order in which one process does.
Heads are cut the same way, queries beside the keys that they attend to.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdserve.engine.models.config import ModelConfig
from pdserve.errors import ConfigError
from pdserve.kv_layout import KVCacheSpec, Rank


@dataclass(frozen=True)
class Shard:
    """One rank's part of a model.

    Attributes:
        config: the whole model's.
        rank: whose part.
    """

    config: ModelConfig
    rank: Rank

    @property
    def layers(self) -> range:
        """Layers of the rank's stage; the first stages have one more where the stages do not divide the layers."""
        num_stages, stage = self.rank.pipeline_parallel_size, self.rank.pipeline_parallel_rank
        length, rest = divmod(self.config.num_layers, num_stages)
        first = stage * length + min(stage, rest)
        return range(first, first + length + (stage < rest))

    @property
    def is_first_stage(self) -> bool:
        """Whether it begins with token ids."""
        return self.rank.pipeline_parallel_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it ends with logits."""
        return self.rank.pipeline_parallel_rank == self.rank.pipeline_parallel_size - 1

    @property
    def samples(self) -> bool:
        """Whether this is the one rank whose tokens count."""
        return self.is_last_stage and self.rank.tensor_parallel_rank == 0

    @property
    def num_heads(self) -> int:
        """Query heads of the rank."""
        return self.config.num_heads // self.rank.tensor_parallel_size

    @property
    def num_kv_heads(self) -> int:
        """KV heads of the rank."""
        return self.config.num_kv_heads // self.rank.tensor_parallel_size

    def build_spec(self, whole: KVCacheSpec) -> KVCacheSpec:
        """The shape of the rank's share of a block that is ``whole`` over all ranks."""
        return KVCacheSpec(
            num_layers=len(self.layers),
            num_kv_heads=self.num_kv_heads,
            head_dim=whole.head_dim,
            block_size=whole.block_size,
            dtype=whole.dtype,
        )


def check_sizes(config: ModelConfig, tensor_parallel_size: int, pipeline_parallel_size: int) -> None:
    """Whether the model can be cut like that.

    Raises:
        ConfigError: it cannot; the message says what is in the way and which sizes work.
    """
    if tensor_parallel_size < 1 or pipeline_parallel_size < 1:
        raise ConfigError(
            f"tensor_parallel_size is {tensor_parallel_size} and pipeline_parallel_size {pipeline_parallel_size}; both "
            "must be at least 1"
        )
    for name, size in _get_cut_sizes(config):
        if size % tensor_parallel_size:
            raise ConfigError(
                f"tensor_parallel_size {tensor_parallel_size} does not divide this model's {size} {name}; it can be "
                f"{_join(_list_tensor_parallel_sizes(config))}"
            )
    if pipeline_parallel_size > config.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size {pipeline_parallel_size} is more than this model's {config.num_layers} layers"
        )


def _get_cut_sizes(config: ModelConfig) -> tuple[tuple[str, int], ...]:
    return (
        ("KV heads", config.num_kv_heads),
        ("attention heads", config.num_heads),
        ("hidden features", config.hidden_size),
        ("feed-forward features", config.intermediate_size),
        ("vocabulary entries", config.vocab_size),
    )


def _list_tensor_parallel_sizes(config: ModelConfig) -> Iterator[int]:
    sizes = [size for _, size in _get_cut_sizes(config)]
    return (n for n in range(1, config.num_kv_heads + 1) if all(size % n == 0 for size in sizes))


def _join(sizes: Iterator[int]) -> str:
    *rest, last = (str(size) for size in sizes)
    return f"{', '.join(rest)} or {last}" if rest else last
