"""Where the model runs, seen from the engine core: one call a step, the same above one process or several."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from pdserve.engine.config import EngineConfig
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.models import ModelConfig
from pdserve.engine.sampling.grammar_masks import GrammarCompiler
from pdserve.engine.scheduler_output import ModelRunnerOutput, SchedulerOutput
from pdserve.engine.worker import Worker, WorkerPlan
from pdserve.kv_layout import Rank


class Executor(Protocol):
    """Runs steps on one or more workers."""

    @property
    def is_lost(self) -> bool:
        """Whether a worker has ended by itself, so that the next step will raise."""
        ...

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step, also one without tokens (KV transfers go on)."""
        ...

    def close(self) -> None:
        """Stop the workers; idempotent."""
        ...


class Workers(Protocol):
    """Those who will compute, each with its share of the model in memory."""

    @property
    def model_config(self) -> ModelConfig:
        """The whole model's shape."""
        ...

    @property
    def numerics(self) -> str:
        """The numerics class of their kernels."""
        ...

    @property
    def device(self) -> torch.device:
        """Where they compute."""
        ...

    @property
    def rank(self) -> Rank:
        """The first one's, which tells how many there are."""
        ...

    def start(self, plan: WorkerPlan, grammars: GrammarCompiler, wake_up: Callable[[], None] | None = None) -> Executor:
        """Make them ready for steps.

        Args:
            plan: what the engine decided.
            grammars: the model's, for the worker in the engine's own process.
            wake_up: called by those of its connector halves that can, on any thread, when there is news.

        Raises:
            ConfigError: memory cannot be had, or the connector's options are wrong.
        """
        ...

    def close(self) -> None:
        """Give up, where `start` has not succeeded; idempotent."""
        ...


class UniProcWorkers:
    """One worker, in the engine's own process and thread; see `Workers`."""

    rank = Rank()

    def __init__(self, config: EngineConfig, directory: Path) -> None:
        self._worker = Worker(config, directory)
        self.model_config = self._worker.model_config
        self.numerics = self._worker.numerics
        self.device = self._worker.device

    def start(
        self, plan: WorkerPlan, grammars: GrammarCompiler, wake_up: Callable[[], None] | None = None
    ) -> UniProcExecutor:
        """See `Workers.start`."""
        return UniProcExecutor(self._worker.build_runner(plan, grammars, wake_up))

    def close(self) -> None:
        """See `Workers.close`: nothing is open."""


class UniProcExecutor:
    """Runs steps in the engine's own process and thread."""

    is_lost = False

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step."""
        return self._runner.execute_model(step)

    def close(self) -> None:
        """Close the runner's connector half."""
        self._runner.close()
