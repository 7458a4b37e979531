"""One measurement of one server: a workload sent, its samples summed up."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.bench.client.client import BenchClient
from pdserve.bench.client.load import LoadPlan, run_load
from pdserve.bench.client.settings import TargetSettings
from pdserve.bench.measure.samples import RequestSample
from pdserve.bench.measure.summary import Objective, Summary, summarise
from pdserve.bench.workload.requests import build_workload
from pdserve.bench.workload.settings import LoadSettings, WorkloadSettings
from pdserve.errors import ConfigError
from pdserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Measurement:
    """What a server was asked, and what came of it."""

    samples: list[RequestSample]
    summary: Summary
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Measurer:
    """What stays the same over many measurements.

    Attributes:
        target: how requests are written.
        tokenizer: measures prompts; None = estimates.
        progress: whether a bar is shown.
    """

    target: TargetSettings
    tokenizer: Tokenizer | None
    progress: bool

    def measure(
        self,
        url: str,
        model: str,
        workload: WorkloadSettings,
        load: LoadSettings,
        *,
        round_index: int = 0,
        label: str = "serve",
        objective: Objective | None = None,
    ) -> Measurement:
        """Send ``workload`` to a server.

        Args:
            url: the server's, without /v1.
            model: the name to ask for.
            workload: the prompts.
            load: when they are sent.
            round_index: each round has prompts and arrivals of its own, so that no cache knows them already.
            label: stands before the progress bar.
            objective: what makes a request good.

        Raises:
            ConfigError: the workload's settings do not go together, or do not fit the endpoint.
        """
        seed = workload.seed + round_index
        built = build_workload(workload, self.tokenizer, num_warmups=load.num_warmups, seed=seed)
        if self.target.endpoint != "chat" and any(request.messages is not None for request in built.requests):
            raise ConfigError("the prompts are messages; send them with --endpoint chat")
        plan = LoadPlan(
            built.requests,
            load.build_due_times(len(built.requests), seed),
            max_concurrency=load.max_concurrency,
            is_timed=load.is_timed,
            warmups=built.warmups,
        )
        samples = run_load(lambda: BenchClient(url, model, self.target), plan, label=label, progress=self.progress)
        return Measurement(samples, summarise(samples, objective), built.notes)
