"""``pdserve bench floors``: what this machine's memory and arithmetic allow for a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from pdserve.bench.measure.machine import describe_machine
from pdserve.bench.measure.machine_rates import measure_rates
from pdserve.bench.measure.model_floors import MachineRates, ModelCosts
from pdserve.bench.measure.offline import WEIGHT_BYTES, load_costs
from pdserve.bench.show.results import check_writable, write_results
from pdserve.bench.show.settings import OutputSettings
from pdserve.bench.show.tables import format_ms, format_number, format_table
from pdserve.engine.config import ModelSettings
from pdserve.settings import load_settings, setting
from pdserve.supervisor.placement import available_cores

_BATCH_SIZES = (1, 8, 32, 64, 256)
_PREFILL_TOKENS = 1000
_BURST = ((200,) * 64, (64,) * 64, 32)
"""The burst that `compare` sends too: prompts, answers, at a time."""


@dataclass(frozen=True)
class FloorSettings:
    """How to measure, and for which model."""

    model: str = setting(ModelSettings.model, help="the model, as for pdserve up")
    dtype: str = setting("bfloat16", choices=tuple(WEIGHT_BYTES), help="dtype of weights and matrix products")
    num_threads: int | None = setting(
        None, help="compute threads; default: one column for 1 and one for all cores", minimum=1
    )
    seconds: float = setting(1.0, help="how long to try for each figure; the best try counts", minimum=0)
    context: int = setting(256, help="tokens of context behind each decode step", minimum=0)


@dataclass(frozen=True)
class FloorsConfig:
    """All settings of ``pdserve bench floors``."""

    floors: FloorSettings = field(default_factory=FloorSettings)
    output: OutputSettings = field(default_factory=OutputSettings)


def run(argv: Sequence[str]) -> int:
    """Measure the machine and print the model's floors.

    Raises:
        ConfigError: a setting is wrong, or the model is not there.
    """
    config = load_settings(
        FloorsConfig,
        prog="pdserve bench floors",
        description="Measure memory and arithmetic of this machine, and the least times they allow for a model.",
        examples=["pdserve bench floors", "pdserve bench floors --num-threads 2 --model ./my-model --seconds 3"],
        argv=argv,
    )
    check_writable(config.output.output, "--output")
    settings = config.floors
    costs = load_costs(settings.model, settings.dtype)
    thread_counts = {1, len(available_cores())} if settings.num_threads is None else {settings.num_threads}
    dtype = getattr(torch, settings.dtype)
    rates = [measure_rates(count, settings.seconds, dtype) for count in sorted(thread_counts)]
    print(render_floors(rates, costs, settings))
    write_results(config.output.output, "floors", config, describe_floors(rates, costs, settings))
    return 0


def render_floors(rates: Sequence[MachineRates], costs: ModelCosts, settings: FloorSettings) -> str:
    """The machine's table and the model's."""
    heading = ["", *(f"{rate.num_threads} thread{'s' * (rate.num_threads > 1)}" for rate in rates)]
    machine_rows = [
        heading,
        ["memory read, GB/s", *(format_number(rate.read_bytes_per_s / 1e9) for rate in rates)],
        ["memory copied, GB/s", *(format_number(rate.copy_bytes_per_s / 1e9) for rate in rates)],
        [f"{settings.dtype} matrix product, GFLOP/s", *(format_number(rate.flops / 1e9) for rate in rates)],
    ]
    floor_rows = [heading]
    for batch_size in _BATCH_SIZES:
        times = [costs.decode_step_floor_s(rate, batch_size, settings.context) for rate in rates]
        floor_rows.append([f"decode step, {batch_size} at a time, ms", *map(format_ms, times)])
    prefill = [costs.prefill_floor_s(rate, _PREFILL_TOKENS) for rate in rates]
    floor_rows.append([f"prefill of {_PREFILL_TOKENS:,} tokens, ms", *map(format_ms, prefill)])
    prompts, answers, limit = _BURST
    bursts = [costs.batch_floor_s(rate, prompts, answers, limit) for rate in rates]
    name = f"{len(prompts)} requests of {prompts[0]} + {answers[0]}, {limit} at a time"
    floor_rows.append([f"{name}, s", *map(format_number, bursts)])
    floor_rows.append(["the same, output tokens/s", *(format_number(sum(answers) / time_s) for time_s in bursts)])
    machine_title = f"this machine ({describe_machine()['processor']}):"
    model_title = (
        f"the least times for {settings.model} in {settings.dtype}: {costs.step_bytes / 1e6:,.0f} MB of weights a"
        f" step, {costs.kv_bytes_per_token:,} bytes of KV a token, {settings.context} tokens of context:"
    )
    return "\n\n".join([machine_title, format_table(machine_rows), model_title, format_table(floor_rows)])


def describe_floors(rates: Sequence[MachineRates], costs: ModelCosts, settings: FloorSettings) -> dict[str, Any]:
    """The same as plain values."""
    prompts, answers, limit = _BURST
    return {
        "costs": {**dataclasses.asdict(costs), "step_bytes": costs.step_bytes},
        "floors": [
            {
                **dataclasses.asdict(rate),
                "decode_step_s": {
                    size: costs.decode_step_floor_s(rate, size, settings.context) for size in _BATCH_SIZES
                },
                "prefill_1000_tokens_s": costs.prefill_floor_s(rate, _PREFILL_TOKENS),
                "burst_s": costs.batch_floor_s(rate, prompts, answers, limit),
            }
            for rate in rates
        ],
    }
