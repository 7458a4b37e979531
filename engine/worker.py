"""One rank's model, KV memory and connector half: loaded, then put together to a model runner.

Two steps, because what the engine decides in between (how many blocks there are, who it is) depends on the first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from pdserve.connectors.base import ConnectorContext, WakesEngine
from pdserve.connectors.registry import load_connector
from pdserve.engine.config import EngineConfig
from pdserve.engine.heap import return_free_memory
from pdserve.engine.kv_memory import TORCH_DTYPES, allocate_kv_cache
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.models import ModelConfig, load_model
from pdserve.engine.models.loader import load_shard
from pdserve.engine.models.shard import Shard
from pdserve.engine.models.sharded_lm import RankGroup
from pdserve.engine.sampling.grammar_masks import GrammarCompiler
from pdserve.engine.sampling.sampler import Sampler
from pdserve.engine.sampling.silent_sampler import SilentSampler
from pdserve.kernels.invariance import check_invariance
from pdserve.kernels.registry import get_backend
from pdserve.kv_layout import ModelIdentity, Rank
from pdserve.protocol import Role

logger = logging.getLogger(__name__)


class WorkerPlan(msgspec.Struct, frozen=True):
    """What the engine decided once the model was loaded; the same for all ranks.

    Attributes:
        num_blocks: blocks of KV memory.
        max_model_len: tokens of the longest sequence.
        engine_id: see `ConnectorContext`.
        role: see `ConnectorContext`.
        identity: see `ConnectorContext`.
    """

    num_blocks: int
    max_model_len: int
    engine_id: str
    role: Role
    identity: ModelIdentity


class Worker:
    """One rank, or the whole of an engine's computing.

    Args:
        config: the engine's settings.
        directory: the model's files.
        group: the other ranks; None = there are none.

    Raises:
        ConfigError: a setting or a model file is wrong.
    """

    def __init__(self, config: EngineConfig, directory: Path, group: RankGroup | None = None) -> None:
        self._config = config
        self._rank = Rank() if group is None else group.rank
        settings = config.model
        torch.set_num_threads(max((settings.num_threads or 1) // self._rank.size, 1))
        dtype = TORCH_DTYPES[settings.dtype]
        backend = get_backend(settings.kernel_backend, dtype, settings.quantization, settings.device)
        self._model = (
            load_model(directory, dtype, backend) if group is None else load_shard(directory, dtype, backend, group)
        )
        return_free_memory()
        if not check_invariance(self._model, config.cache.block_size):
            logger.warning(
                "kernels %s are not batch-invariant on this machine: answers may differ between prefill/decode and "
                "one engine; choose another --kernel-backend",
                backend.numerics,
            )

    @property
    def numerics(self) -> str:
        """The numerics class of the kernels."""
        return self._model.backend.numerics

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._model.backend.device

    @property
    def model_config(self) -> ModelConfig:
        """The whole model's shape."""
        return self._model.config

    def build_runner(
        self, plan: WorkerPlan, grammars: GrammarCompiler, wake_up: Callable[[], None] | None = None
    ) -> ModelRunner:
        """Allocate KV memory, start the connector's half and run the model once.

        Args:
            plan: what was decided.
            grammars: the model's.
            wake_up: see `EngineCore.build`.

        Raises:
            ConfigError: memory cannot be had, or the connector's options are wrong.
        """
        model, config = self._model, self._config
        shard = Shard(model.config, self._rank)
        spec = shard.build_spec(plan.identity.kv)
        kv_cache = allocate_kv_cache(spec, plan.num_blocks, self.device)
        connector = load_connector(config.connector.connector)
        worker_half = connector.build_worker(build_context(config, plan, model.config, self._rank))
        worker_half.register_kv_caches(kv_cache, spec)
        set_wake_up(worker_half, wake_up)
        runner = ModelRunner(
            model,
            kv_cache,
            Sampler(frozenset(model.config.eos_token_ids), grammars) if shard.samples else SilentSampler(),
            worker_half,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_model_len=plan.max_model_len,
            layerwise=connector.features.layerwise,
            num_ranks=self._rank.size,
        )
        runner.warm_up()
        return runner


def set_wake_up(half: object, wake_up: Callable[[], None] | None) -> None:
    """Tell a connector's half how to wake the engine, if it can."""
    if wake_up is not None and isinstance(half, WakesEngine):
        half.set_wake_up(wake_up)


def build_context(config: EngineConfig, plan: WorkerPlan, model_config: ModelConfig, rank: Rank) -> ConnectorContext:
    """What a connector's half of ``rank`` is built with."""
    return ConnectorContext(
        engine_id=plan.engine_id,
        role=plan.role,
        identity=plan.identity,
        spec=Shard(model_config, rank).build_spec(plan.identity.kv),
        options=config.connector.connector_options,
        rank=rank,
    )
