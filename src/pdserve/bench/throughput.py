"""``pdserve bench throughput``: many requests in this process, no server between, as fast as the engine goes."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

from pdserve.bench.latency import CONNECTOR_SETTINGS, measure_engine_rates
from pdserve.bench.measure.model_floors import MachineRates
from pdserve.bench.measure.offline import OfflineResult, build_core, build_requests, load_costs, run_offline
from pdserve.bench.measure.summary import Summary, percentile, summarise
from pdserve.bench.show.report import render_lost
from pdserve.bench.show.results import check_writable, describe_samples, describe_summary, write_results
from pdserve.bench.show.settings import OutputSettings
from pdserve.bench.show.tables import format_ms, format_number, format_share, format_table
from pdserve.bench.workload.lengths import LengthMix
from pdserve.engine.config import EngineConfig
from pdserve.settings import load_settings, section, setting

_WARMUP_SEED = 1_000_003
_NUM_WARMUPS = 4


@dataclass(frozen=True)
class ThroughputSettings:
    """The requests."""

    num_requests: int = setting(64, help="requests to run", minimum=1)
    prompt_tokens: str = setting(
        "200", help="length of prompts, as a mix: 200, 100-300, 128:0.7,1024:0.3", metavar="MIX"
    )
    output_tokens: str = setting("64", help="length of answers, as a mix", metavar="MIX")
    floor_seconds: float = setting(
        0.5,
        help="measure this machine so long for each figure, to show the share of the possible; 0 = do not",
        minimum=0,
    )
    seed: int = setting(0, help="equal seeds give equal requests", minimum=0)


@dataclass(frozen=True)
class ThroughputConfig:
    """All settings of ``pdserve bench throughput``."""

    throughput: ThroughputSettings = field(default_factory=ThroughputSettings)
    engine: EngineConfig = section(EngineConfig, exclude=CONNECTOR_SETTINGS)
    output: OutputSettings = field(default_factory=OutputSettings)


def run(argv: Sequence[str]) -> int:
    """Measure and print.

    Raises:
        ConfigError: a setting is wrong, the model is not there, or a request does not fit.
    """
    config = load_settings(
        ThroughputConfig,
        prog="pdserve bench throughput",
        description="Run many requests in this process, as fast as the engine goes.",
        examples=[
            "pdserve bench throughput",
            "pdserve bench throughput --num-requests 256 --prompt-tokens 32-1024 --output-tokens 16-256",
        ],
        argv=argv,
    )
    check_writable(config.output.output, "--output")
    settings = config.throughput
    lengths = _draw_lengths(settings)
    with contextlib.closing(build_core(config.engine)) as core:
        run_offline(core, build_requests(core, lengths[:_NUM_WARMUPS], _WARMUP_SEED))
        requests = build_requests(core, lengths, settings.seed)
        disable = None if config.output.progress else True
        with tqdm(total=len(requests), desc="throughput", unit="req", disable=disable) as bar:
            result = run_offline(core, requests, bar)
        rates = measure_engine_rates(config.engine, settings.floor_seconds)
    summary = summarise(result.samples)
    floor_s = None if rates is None else _floor_s(config, lengths, rates)
    print(_render(config, result, summary, floor_s))
    write_results(
        config.output.output,
        "throughput",
        config,
        {
            "summary": describe_summary(summary),
            "rates": None if rates is None else dataclasses.asdict(rates),
            "floor_s": floor_s,
            "requests": describe_samples(result.samples),
            "steps": [dataclasses.asdict(step) for step in result.steps],
        },
    )
    return 1 if summary.num_lost else 0


def _draw_lengths(settings: ThroughputSettings) -> list[tuple[int, int]]:
    prompt_mix = LengthMix.parse(settings.prompt_tokens, "--prompt-tokens")
    output_mix = LengthMix.parse(settings.output_tokens, "--output-tokens")
    generator = random.Random(settings.seed)
    return [(prompt_mix.draw(generator), output_mix.draw(generator)) for _ in range(settings.num_requests)]


def _floor_s(config: ThroughputConfig, lengths: Sequence[tuple[int, int]], rates: MachineRates) -> float:
    costs = load_costs(config.engine.model.model, config.engine.model.dtype)
    prompt_lens, output_lens = zip(*lengths, strict=True)
    return costs.batch_floor_s(rates, prompt_lens, output_lens, config.engine.scheduler.max_num_seqs)


def _render(config: ThroughputConfig, result: OfflineResult, summary: Summary, floor_s: float | None) -> str:
    steps = sorted(step.seconds for step in result.steps)
    rows = [
        ["", "value"],
        ["requests answered whole", f"{summary.num_ok:,} of {summary.num_requests:,}"],
        ["duration, s", format_number(summary.duration_s)],
        ["requests/s", format_number(summary.requests_per_s)],
        ["output tokens/s", format_number(summary.output_tokens_per_s)],
        ["prompt and output tokens/s", format_number(summary.total_tokens_per_s)],
        ["engine steps", f"{len(steps):,}"],
        ["step p50, ms", format_ms(percentile(steps, 0.5))],
        ["step p99, ms", format_ms(percentile(steps, 0.99))],
    ]
    if floor_s is not None:
        rows.append(["floor of the duration, s", format_number(floor_s)])
        rows.append(["share of the possible", format_share(floor_s / summary.duration_s)])
    model = config.engine.model
    parts = [f"{model.model} in {model.dtype}, offline:", format_table(rows)]
    if summary.num_lost:
        parts.append(render_lost(summary.lost, summary.num_lost, summary.num_requests))
    return "\n\n".join(parts)
