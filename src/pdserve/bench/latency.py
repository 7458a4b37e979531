"""``pdserve bench latency``: one batch in this process, timed step by step, beside what the machine allows."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm

from pdserve.bench.measure.machine_rates import measure_rates
from pdserve.bench.measure.model_floors import MachineRates
from pdserve.bench.measure.offline import OfflineResult, build_core, build_requests, load_costs, run_offline
from pdserve.bench.measure.summary import Distribution, summarise
from pdserve.bench.show.report import render_lost
from pdserve.bench.show.results import check_writable, describe_samples, write_results
from pdserve.bench.show.settings import OutputSettings
from pdserve.bench.show.tables import MISSING, format_ms, format_number, format_share, format_table
from pdserve.engine.config import EngineConfig
from pdserve.settings import load_settings, section, setting

CONNECTOR_SETTINGS = ("connector", "connector_options")
_WARMUP_SEED = 1_000_003


@dataclass(frozen=True)
class LatencySettings:
    """The batch, and how often it is run."""

    batch: int = setting(1, help="requests that run together", minimum=1)
    prompt_tokens: int = setting(512, help="length of each prompt", minimum=1)
    output_tokens: int = setting(128, help="length of each answer", minimum=1)
    repeats: int = setting(3, help="times to run it, each time with other prompts", minimum=1)
    floor_seconds: float = setting(
        0.5, help="measure this machine so long for each figure, to show shares of the possible; 0 = do not", minimum=0
    )
    seed: int = setting(0, help="equal seeds give equal prompts", minimum=0)


@dataclass(frozen=True)
class LatencyConfig:
    """All settings of ``pdserve bench latency``."""

    latency: LatencySettings = field(default_factory=LatencySettings)
    engine: EngineConfig = section(EngineConfig, exclude=CONNECTOR_SETTINGS)
    output: OutputSettings = field(default_factory=OutputSettings)


@dataclass(frozen=True, slots=True)
class _Floors:
    """The least times of a batch; None where the machine was not measured."""

    ttft_s: float | None = None
    step_s: float | None = None


def run(argv: Sequence[str]) -> int:
    """Measure and print.

    Raises:
        ConfigError: a setting is wrong, the model is not there, or the batch does not fit.
    """
    config = load_settings(
        LatencyConfig,
        prog="pdserve bench latency",
        description="Run one batch in this process: time to first token and decode steps, and their share of the"
        " possible.",
        examples=[
            "pdserve bench latency",
            "pdserve bench latency --prompt-tokens 1024 --output-tokens 1 --num-threads 2",
            "pdserve bench latency --batch 32 --num-blocks 2048",
        ],
        argv=argv,
    )
    check_writable(config.output.output, "--output")
    settings = config.latency
    lengths = [(settings.prompt_tokens, settings.output_tokens)] * settings.batch
    with contextlib.closing(build_core(config.engine)) as core:
        run_offline(core, build_requests(core, lengths, _WARMUP_SEED))
        results = []
        bar = tqdm(range(settings.repeats), desc="latency", disable=None if config.output.progress else True)
        for repeat in bar:
            results.append(run_offline(core, build_requests(core, lengths, settings.seed + repeat)))
        rates = measure_engine_rates(config.engine, settings.floor_seconds)
    floors = _build_floors(config, rates)
    print(_render(config, results, floors))
    write_results(config.output.output, "latency", config, _describe(results, rates, floors))
    summary = summarise([sample for result in results for sample in result.samples])
    if summary.num_lost:
        print(f"\n{render_lost(summary.lost, summary.num_lost, summary.num_requests)}")
    return 1 if summary.num_lost else 0


def measure_engine_rates(engine: EngineConfig, seconds: float) -> MachineRates | None:
    """The machine's rates with as many threads as the engine has.

    None for 0 seconds, for quantised weights and for a GPU: their arithmetic is another than what is measured.
    """
    if seconds <= 0 or engine.model.quantization != "none" or engine.model.device != "cpu":
        return None
    return measure_rates(engine.model.num_threads or 1, seconds, getattr(torch, engine.model.dtype))


def _build_floors(config: LatencyConfig, rates: MachineRates | None) -> _Floors:
    if rates is None:
        return _Floors()
    settings, model = config.latency, config.engine.model
    costs = load_costs(model.model, model.dtype)
    context_len = settings.prompt_tokens + settings.output_tokens / 2
    return _Floors(
        ttft_s=costs.prefill_floor_s(rates, settings.prompt_tokens) * settings.batch,
        step_s=costs.decode_step_floor_s(rates, settings.batch, context_len),
    )


def _render(config: LatencyConfig, results: Sequence[OfflineResult], floors: _Floors) -> str:
    settings = config.latency
    firsts = Distribution.of(_last_ttft_s(result) for result in results if _is_whole(result))
    steps = Distribution.of(step.seconds for result in results for step in result.decode_steps)
    rows = [["ms", "p50", "p90", "p99", "floor", "share of the possible"]]
    for name, values, floor_s in (
        ("until all have their first token", firsts, floors.ttft_s),
        ("decode step", steps, floors.step_s),
    ):
        rows.append([name, *_render_row(values, floor_s)])
    speed = MISSING if steps is None else format_number(settings.batch / steps.p50)
    title = (
        f"{settings.batch} x ({settings.prompt_tokens} + {settings.output_tokens}) tokens of"
        f" {config.engine.model.model} in {config.engine.model.dtype}, {settings.repeats} times:"
    )
    return "\n\n".join([title, format_table(rows), f"decode: {speed} tokens/s"])


def _render_row(values: Distribution | None, floor_s: float | None) -> list[str]:
    if values is None:
        return [MISSING] * 5
    share = None if floor_s is None else floor_s / values.p50
    return [
        format_ms(values.p50),
        format_ms(values.p90),
        format_ms(values.p99),
        format_ms(floor_s),
        format_share(share),
    ]


def _is_whole(result: OfflineResult) -> bool:
    return all(sample.failure is None for sample in result.samples)


def _last_ttft_s(result: OfflineResult) -> float:
    return max(sample.ttft_s for sample in result.samples)


def _describe(results: Sequence[OfflineResult], rates: MachineRates | None, floors: _Floors) -> dict[str, Any]:
    return {
        "rates": None if rates is None else dataclasses.asdict(rates),
        "floors": dataclasses.asdict(floors),
        "runs": [
            {
                "requests": describe_samples(result.samples),
                "steps": [dataclasses.asdict(step) for step in result.steps],
            }
            for result in results
        ],
    }
