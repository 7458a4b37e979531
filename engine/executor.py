"""Where the model runs, seen from the engine core: one call a step, the same above one process or several."""

from __future__ import annotations

from typing import Protocol

from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.scheduler_output import ModelRunnerOutput, SchedulerOutput


class Executor(Protocol):
    """Runs steps on one or more workers."""

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step, also one without tokens (KV transfers go on)."""
        ...

    def close(self) -> None:
        """Stop the workers; idempotent."""
        ...


class UniProcExecutor:
    """One worker, in the engine's own process and thread."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step."""
        return self._runner.execute_model(step)

    def close(self) -> None:
        """Close the runner's connector half."""
        self._runner.close()
