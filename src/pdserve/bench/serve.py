"""``pdserve bench serve``: sends a workload to a running server and tells how it was answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.bench.client.discovery import find_model
from pdserve.bench.client.settings import TargetSettings, base_url
from pdserve.bench.measurement import Measurer
from pdserve.bench.show.plots import check_plot, plot_run
from pdserve.bench.show.report import render_summary
from pdserve.bench.show.results import check_writable, describe_samples, describe_summary, write_results
from pdserve.bench.show.settings import ObjectiveSettings, OutputSettings, PlotSettings
from pdserve.bench.workload.settings import LoadSettings, WorkloadSettings
from pdserve.bench.workload.tokenizers import find_tokenizer
from pdserve.errors import ConfigError
from pdserve.settings import load_settings


@dataclass(frozen=True)
class ServeConfig:
    """All settings of ``pdserve bench serve``."""

    target: TargetSettings = field(default_factory=TargetSettings)
    workload: WorkloadSettings = field(default_factory=WorkloadSettings)
    load: LoadSettings = field(default_factory=LoadSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    output: OutputSettings = field(default_factory=OutputSettings)
    plots: PlotSettings = field(default_factory=PlotSettings)


def run(argv: Sequence[str]) -> int:
    """Measure, print, and say by the exit status whether every request was answered whole.

    Raises:
        ConfigError: a setting is wrong, or the server is not there.
    """
    config = load_settings(
        ServeConfig,
        prog="pdserve bench serve",
        description="Send requests to any server that speaks the OpenAI API, and measure its answers.",
        examples=[
            "pdserve bench serve --rate 1.6 --num-requests 96",
            "pdserve bench serve --max-concurrency 32 --prompt-tokens 100-300 --output-tokens 64",
            "pdserve bench serve --sharegpt conversations.json --endpoint chat --rate 2 --slo-ttft-ms 500",
            "pdserve bench serve --url http://10.0.0.1:8000 --prompts-file prompts.jsonl --plot run.png",
        ],
        argv=argv,
    )
    config.load.check()
    objective = config.objective.build()
    check_writable(config.output.output, "--output")
    check_plot(config.plots.plot)
    if config.target.url is None:
        raise ConfigError("--url: no server is named")
    url = base_url(config.target.url)
    model = find_model(url, config.target.model)
    measurer = Measurer(config.target, find_tokenizer(config.workload.tokenizer, model), config.output.progress)
    print(f"{model} at {url}, {config.load.describe()}", flush=True)
    measurement = measurer.measure(url, model, config.workload, config.load, objective=objective)
    summary = measurement.summary
    print("\n\n".join(["", *(f"note: {note}" for note in measurement.notes), render_summary(summary)]), flush=True)
    write_results(
        config.output.output,
        "serve",
        config,
        {"summary": describe_summary(summary), "requests": describe_samples(measurement.samples)},
    )
    if config.plots.plot is not None:
        plot_run(config.plots.plot, measurement.samples, f"{model}, {config.load.describe()}")
    return 1 if summary.num_lost else 0
