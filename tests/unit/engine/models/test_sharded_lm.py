"""Ranks as threads, with real collectives between them: the bits of one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from tiny_models import BLOCK_SIZE, build_reference, save
from torch import Tensor

from pdserve.engine.models import ModelConfig, load_model
from pdserve.engine.models.loader import load_shard
from pdserve.engine.models.shard import Shard, check_sizes
from pdserve.engine.models.sharded_lm import ShardedLM
from pdserve.engine.parallel.host_group import HostGroup, create_exchanges
from pdserve.errors import ConfigError
from pdserve.kernels.base import AttentionMetadata
from pdserve.kernels.registry import get_backend
from pdserve.kv_layout import Rank

T = TypeVar("T")
TOKENS = torch.randint(0, 130, (90,), generator=torch.Generator().manual_seed(5))
STEPS = ((0, 50), (50, 89), (89, 90))
SIZES = ((2, 1), (1, 2), (2, 2))


def run_on_ranks(ranks: list[Rank], function: Callable[[Rank], T]) -> list[T]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [future.result(60) for future in [pool.submit(function, rank) for rank in ranks]]


def compute(model: ShardedLM, num_layers: int, num_kv_heads: int) -> list[Tensor]:
    """Each step's hidden states, logits and likeliest tokens; nothing from a stage that is not the last."""
    dtype = model.backend.dtype
    kv_cache = torch.full((6, num_layers, 2, num_kv_heads, BLOCK_SIZE, model.config.head_dim), torch.nan, dtype=dtype)
    results = []
    for start, stop in STEPS:
        metadata = AttentionMetadata.build([stop - start], [stop], [[3, 1, 5, 0, 4, 2]], BLOCK_SIZE)
        with torch.inference_mode():
            hidden = model.forward(TOKENS[start:stop], metadata, kv_cache)
            if hidden is not None:
                results += [hidden, model.compute_logits(hidden), *model.find_likeliest(hidden)]
    return results


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("backend", ["cpp", "onednn", "reference"])
@pytest.mark.parametrize("name", ["llama-tied", "qwen3", "llama-biased"])
def test_ranks_have_the_bits_of_one_process(name: str, backend: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    dtype = torch.bfloat16 if backend == "cpp" else torch.float32
    try:
        get_backend(backend, dtype)
    except ConfigError as error:
        pytest.skip(f"does not run here: {error}")
    directory = save(build_reference(name, vocab_size=130), tmp_path / "model")
    whole = load_model(directory, dtype, get_backend(backend, dtype))
    expected = compute(whole, whole.config.num_layers, whole.config.num_kv_heads)

    ranks = Rank(tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1]).all_ranks
    exchange_fds = create_exchanges(ranks[0])

    def run(rank: Rank) -> list[Tensor]:
        exchange_fd = exchange_fds[rank.pipeline_parallel_rank] if exchange_fds else None
        group = HostGroup(rank, exchange_fd, tmp_path / "rendezvous", timeout_s=60)
        model = load_shard(directory, dtype, get_backend(backend, dtype), group)
        return compute(model, 2 // rank.pipeline_parallel_size, 2 // rank.tensor_parallel_size)

    for rank, results in zip(ranks, run_on_ranks(ranks, run), strict=True):
        if rank.pipeline_parallel_rank < rank.pipeline_parallel_size - 1:
            assert results == []
            continue
        for actual, wanted in zip(results, expected, strict=True):
            assert torch.equal(actual, wanted)
    for fd in exchange_fds:
        os.close(fd)


def test_stages_have_all_layers_in_order_and_one_rank_samples(tmp_path: Path) -> None:
    config = ModelConfig.from_directory(save(build_reference("llama", num_hidden_layers=7), tmp_path))
    shards = [Shard(config, rank) for rank in Rank(tensor_parallel_size=2, pipeline_parallel_size=3).all_ranks]
    assert [list(shard.layers) for shard in shards[::2]] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [shard.layers for shard in shards[::2]] == [shard.layers for shard in shards[1::2]]
    assert [shard.samples for shard in shards] == [False, False, False, False, True, False]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((3, 1), "tensor_parallel_size 3 does not divide this model's 2 KV heads; it can be 1 or 2"),
        ((1, 3), "pipeline_parallel_size 3 is more than this model's 2 layers"),
        ((0, 1), "tensor_parallel_size is 0 and pipeline_parallel_size 1; both must be at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_those_that_do(
    sizes: tuple[int, int], message: str, tmp_path: Path
) -> None:
    config = ModelConfig.from_directory(save(build_reference("llama", vocab_size=130), tmp_path))
    with pytest.raises(ConfigError) as caught:
        check_sizes(config, *sizes)
    assert caught.value.message == message
