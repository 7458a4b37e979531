"""`pdserve.engine.executor.Executor` over worker processes: one step goes to all of them, one result comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch

from pdserve.connectors.output_aggregator import OutputAggregator
from pdserve.engine.config import EngineConfig
from pdserve.engine.models import ModelConfig
from pdserve.engine.models.shard import Shard, check_sizes
from pdserve.engine.parallel.messages import Loaded, Started, StepCodec, StepDone, build_step_codec
from pdserve.engine.parallel.worker_pool import WorkerPool
from pdserve.engine.sampling.grammar_masks import GrammarCompiler
from pdserve.engine.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pdserve.engine.worker import WorkerPlan
from pdserve.errors import ConfigError
from pdserve.kv_layout import Rank


class MultiProcExecutor:
    """Runs steps on all ranks.

    Args:
        pool: the workers, started.
        codec: for steps.
        ranks: all of the engine's, in order.
        sampling_index: the rank whose tokens count.
        timeout_s: how long a step may take.
    """

    def __init__(
        self, pool: WorkerPool, codec: StepCodec, ranks: Sequence[Rank], sampling_index: int, timeout_s: float
    ) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._codec = codec
        self._sampling_index = sampling_index
        self._aggregator = OutputAggregator(len(ranks))
        self._sampled_token_ids: dict[str, int] = {}

    @property
    def is_lost(self) -> bool:
        """See `Executor.is_lost`."""
        return self._pool.is_lost

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step on all ranks.

        Raises:
            EngineError: a worker has ended, or hangs.
        """
        self._aggregator.expect(step.loads_started, step.finished_sending_due)
        self._pool.broadcast(self._codec.encode_step(step, self._sampled_token_ids))
        outputs = [self._codec.decode_output(done) for done in self._pool.collect(StepDone, self._timeout_s)]
        output = outputs[self._sampling_index]
        output.connector_output = self._aggregator.merge([each.connector_output for each in outputs])
        self._sampled_token_ids = output.sampled_token_ids
        return output

    def close(self) -> None:
        """End the workers; idempotent."""
        self._pool.close()


class RankWorkers:
    """See `pdserve.engine.executor.Workers`: a process for each rank.

    Args:
        config: the engine's settings.
        directory: the model's files.
        engine_name: for the workers' logs.

    Raises:
        ConfigError: the model cannot be cut like that, the connector serves no ranks, or as `Worker`.
        EngineError: a worker ended.
    """

    def __init__(self, config: EngineConfig, directory: Path, engine_name: str) -> None:
        settings = config.model
        if settings.device != "cpu":
            raise ConfigError(f"tensor and pipeline parallel compute on device cpu only, not on {settings.device}")
        self.model_config = ModelConfig.from_directory(directory)
        check_sizes(self.model_config, settings.tensor_parallel_size, settings.pipeline_parallel_size)
        self.rank = Rank(
            tensor_parallel_size=settings.tensor_parallel_size, pipeline_parallel_size=settings.pipeline_parallel_size
        )
        self._codec = build_step_codec(config.connector, self.rank)
        self._timeout_s = settings.worker_timeout_s
        self.device = torch.device("cpu")
        self._pool = WorkerPool(self.rank.all_ranks)
        try:
            self._pool.start(config, directory, engine_name)
            self.numerics = self._pool.collect(Loaded)[0].numerics
            self._pool.end_rendezvous()
        except BaseException:
            self.close()
            raise

    def start(
        self, plan: WorkerPlan, grammars: GrammarCompiler, wake_up: Callable[[], None] | None = None
    ) -> MultiProcExecutor:
        """See `Workers.start`."""
        self._pool.send(msgspec.msgpack.encode(plan))
        self._pool.collect(Started)
        self._pool.watch(wake_up or _do_nothing)
        samples = [Shard(self.model_config, rank).samples for rank in self.rank.all_ranks]
        return MultiProcExecutor(self._pool, self._codec, self.rank.all_ranks, samples.index(True), self._timeout_s)

    def close(self) -> None:
        """See `Workers.close`."""
        self._pool.close()


def _do_nothing() -> None:
    """Nobody is to be woken."""
