"""From settings to a running engine core: the engine's composition root."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path

from pdserve.checkpoint import architecture_digest, prepare_weights, resolve_model, weights_digest
from pdserve.connectors.registry import load_connector
from pdserve.engine.config import EngineConfig, ModelSettings
from pdserve.engine.core import EngineCore
from pdserve.engine.executor import UniProcWorkers, Workers
from pdserve.engine.kv_memory import resolve_num_blocks
from pdserve.engine.models import ModelConfig, load_config_file
from pdserve.engine.sampling.grammar_masks import GrammarCompiler
from pdserve.engine.worker import WorkerPlan, build_context, set_wake_up
from pdserve.errors import ConfigError
from pdserve.kv_layout import KVCacheSpec, ModelIdentity
from pdserve.protocol import InstanceLimits, Role

logger = logging.getLogger(__name__)

MAX_LOGPROBS = 20


def build_engine(
    cls: type[EngineCore],
    config: EngineConfig,
    *,
    role: Role,
    engine_id: str,
    on_progress: Callable[[str], None] | None = None,
    wake_up: Callable[[], None] | None = None,
) -> EngineCore:
    """See `EngineCore.build`."""
    tell = on_progress or logger.info
    started_s = time.monotonic()
    _check_block_size(config.cache.block_size)
    source = resolve_model(config.model.model)
    tell(f"loading {source.name} in {_describe_precision(config.model)}")
    directory = prepare_weights(source, config.model.dtype)
    workers = _load_workers(config, directory, engine_id)
    try:
        model_config = workers.model_config
        spec = _build_spec(config, model_config)
        num_blocks = resolve_num_blocks(config.cache, spec, workers.device)
        max_model_len = _resolve_max_model_len(config, model_config, spec, num_blocks)
        config = _resolve(config, source.name, num_blocks, max_model_len)
        identity = ModelIdentity(
            weights=weights_digest(directory),
            architecture=architecture_digest(load_config_file(directory)),
            compute_dtype=config.model.dtype,
            numerics=workers.numerics,
            kv=spec,
            tensor_parallel_size=workers.rank.tensor_parallel_size,
            pipeline_parallel_size=workers.rank.pipeline_parallel_size,
        )
        tell(
            f"{source.name} loaded in {time.monotonic() - started_s:.1f} s; KV: {num_blocks} blocks of "
            f"{config.cache.block_size} = {num_blocks * config.cache.block_size} tokens, "
            f"{num_blocks * spec.block_bytes / 2**20:.0f} MiB"
        )
        eos_token_ids = frozenset(model_config.eos_token_ids)
        grammars = GrammarCompiler(directory, model_config.vocab_size, eos_token_ids)
        plan = WorkerPlan(num_blocks, max_model_len, engine_id, role, identity)
        connector = load_connector(config.connector.connector)
        scheduler_half = connector.build_scheduler(build_context(config, plan, model_config, workers.rank))
        set_wake_up(scheduler_half, wake_up)
        executor = workers.start(plan, grammars, wake_up)
    except BaseException:
        workers.close()
        raise
    return cls(
        config,
        identity=identity,
        limits=_build_limits(config, model_config, num_blocks, max_model_len),
        eos_token_ids=eos_token_ids,
        executor=executor,
        connector=scheduler_half,
        grammars=grammars,
    )


def _load_workers(config: EngineConfig, directory: Path, engine_id: str) -> Workers:
    settings = config.model
    if settings.tensor_parallel_size == settings.pipeline_parallel_size == 1:
        return UniProcWorkers(config, directory)
    from pdserve.engine.parallel.executor import RankWorkers

    return RankWorkers(config, directory, engine_id.partition("@")[0])


def _check_block_size(block_size: int) -> None:
    """Before weights are loaded: what is checked with them are kernels that take such blocks only."""
    if block_size < 1 or block_size & (block_size - 1):
        raise ConfigError(f"block_size is {block_size}; it must be a power of two")


def _describe_precision(settings: ModelSettings) -> str:
    quantised = "" if settings.quantization == "none" else f" with {settings.quantization} weights"
    return f"{settings.dtype}{quantised}"


def _build_spec(config: EngineConfig, model_config: ModelConfig) -> KVCacheSpec:
    return KVCacheSpec(
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        block_size=config.cache.block_size,
        dtype=config.model.dtype if config.cache.kv_dtype == "auto" else config.cache.kv_dtype,
    )


def _resolve_max_model_len(config: EngineConfig, model_config: ModelConfig, spec: KVCacheSpec, num_blocks: int) -> int:
    """The longest sequence: as asked, within the model's context and what the whole pool holds."""
    context, pool = model_config.max_position_embeddings, num_blocks * spec.block_size
    asked = config.model.max_model_len
    if asked is None:
        return min(context, pool)
    if asked < 2 or asked > context:
        raise ConfigError(f"max_model_len is {asked}; this model takes 2 to {context} tokens")
    if asked > pool:
        raise ConfigError(
            f"max_model_len is {asked}, but KV memory holds {pool} tokens ({num_blocks} blocks of "
            f"{spec.block_size}); raise memory_fraction or num_blocks"
        )
    return asked


def _resolve(config: EngineConfig, source_name: str, num_blocks: int, max_model_len: int) -> EngineConfig:
    """The settings with everything derived filled in."""
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_queue_len"):
        value = getattr(config.scheduler, name)
        if value < 1:
            raise ConfigError(f"{name} is {value}; it must be at least 1")
    served_model_name = config.model.served_model_name or source_name
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, served_model_name=served_model_name, max_model_len=max_model_len),
        cache=dataclasses.replace(config.cache, num_blocks=num_blocks),
    )


def _build_limits(
    config: EngineConfig, model_config: ModelConfig, num_blocks: int, max_model_len: int
) -> InstanceLimits:
    return InstanceLimits(
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_queue_len=config.scheduler.max_queue_len,
        num_blocks=num_blocks,
        vocab_size=model_config.vocab_size,
        max_logprobs=min(MAX_LOGPROBS, model_config.vocab_size),
    )
