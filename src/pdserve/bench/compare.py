"""``pdserve bench compare``: the same work on the same cores, for pdserve and for what people would take instead.

Servers run one at a time: nothing else competes for the cores, and what changes on the machine between two rounds
cancels in the ratios, which are taken within a round.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.bench.client.discovery import find_model
from pdserve.bench.client.settings import TargetSettings
from pdserve.bench.comparison import Results, render
from pdserve.bench.contestants import ContestantSettings, list_absent, plan_contestants
from pdserve.bench.measure.offline import load_costs
from pdserve.bench.measurement import Measurer
from pdserve.bench.scenarios import CUSTOM, CUSTOM_METRICS, SCENARIOS, Scenario
from pdserve.bench.servers.pinned_rates import measure_pinned_rates
from pdserve.bench.servers.server import ServerPlan, running
from pdserve.bench.show.results import check_writable, describe_summary, write_results
from pdserve.bench.show.settings import OutputSettings
from pdserve.bench.workload.settings import LoadSettings, WorkloadSettings
from pdserve.bench.workload.tokenizers import load_named_tokenizer
from pdserve.engine.config import CacheSettings, EngineConfig, ModelSettings, SchedulerSettings
from pdserve.errors import ConfigError
from pdserve.settings import load_settings, section, setting
from pdserve.supervisor.placement import available_cores, can_pin

_MAX_MODEL_LEN = 2048
_MAX_NUM_SEQS = 32


@dataclass(frozen=True)
class CompareSettings:
    """What is measured, how often and where."""

    scenarios: list[str] = setting(
        ["decode", "prefill", "burst"],
        help=f"{', '.join(SCENARIOS)}, or {CUSTOM}: the workload and load of the settings below",
        metavar="NAME",
    )
    rounds: int = setting(3, help="how often everybody is measured, in turn", minimum=1)
    cores: list[str] = setting([], help="cores that every server is pinned to; default: all", metavar="N")
    floor_seconds: float = setting(
        0.5, help="measure the cores so long for each figure, to show what is possible; 0 = do not", minimum=0
    )


def _default_engine() -> EngineConfig:
    return EngineConfig(
        model=ModelSettings(max_model_len=_MAX_MODEL_LEN), scheduler=SchedulerSettings(max_num_seqs=_MAX_NUM_SEQS)
    )


@dataclass(frozen=True)
class CompareConfig:
    """All settings of ``pdserve bench compare``."""

    compare: CompareSettings = field(default_factory=CompareSettings)
    contestants: ContestantSettings = field(default_factory=ContestantSettings)
    workload: WorkloadSettings = section(WorkloadSettings, exclude=("tokenizer",))
    load: LoadSettings = field(default_factory=LoadSettings)
    engine: EngineConfig = section(_default_engine, exclude=("enable_prefix_caching", "num_threads"))
    output: OutputSettings = field(default_factory=OutputSettings)


def run(argv: Sequence[str]) -> int:
    """Measure everybody and print the ratios.

    Raises:
        ConfigError: a setting is wrong, a peer is not installed, or a server does not start.
    """
    config = load_settings(
        CompareConfig,
        prog="pdserve bench compare",
        description="Give pdserve and its peers the same work on the same cores, in turn, and print ratios.",
        examples=[
            "pdserve bench compare --vllm-venv ~/vllm --llama-server ~/llama/bin/llama-server",
            "pdserve bench compare --splits 0:1 1:1 --scenarios poisson --cores 0 1",
            "pdserve bench compare --transformers-venv .venv --scenarios custom --num-requests 8 --rounds 1",
            "pdserve bench compare --peer old=http://127.0.0.1:9000 --peer new=http://127.0.0.1:9001",
        ],
        argv=argv,
    )
    check_writable(config.output.output, "--output")
    config.load.check()
    scenarios = choose_scenarios(config)
    cores = choose_cores(config.compare.cores)
    engine = dataclasses.replace(config.engine, cache=_cache_settings(config))
    plans = plan_contestants(config.contestants, engine, cores)
    for line in list_absent(config.contestants):
        print(f"note: {line}")
    if len(plans) == 1:
        raise ConfigError("there is only one server to compare; name a peer, or several --splits")
    _keep_away_from(cores)
    results = _measure(config, scenarios, plans, cores)
    print(render(results, scenarios, [plan.name for plan in plans], cores))
    write_results(config.output.output, "compare", config, _describe(results, cores))
    return 1 if results.num_lost else 0


def choose_scenarios(config: CompareConfig) -> list[Scenario]:
    """The scenarios by name.

    Raises:
        ConfigError: one that there is not.
    """
    chosen = []
    for name in config.compare.scenarios:
        if name == CUSTOM:
            chosen.append(Scenario(CUSTOM, config.load.describe(), config.workload, config.load, CUSTOM_METRICS))
        elif name in SCENARIOS:
            chosen.append(SCENARIOS[name])
        else:
            raise ConfigError(f"--scenarios: {name!r} is none of {', '.join([*SCENARIOS, CUSTOM])}")
    return chosen


def choose_cores(named: Sequence[str]) -> tuple[int, ...]:
    """The cores that servers run on.

    Raises:
        ConfigError: one of them is not there, or this system cannot pin.
    """
    available = available_cores()
    if not named:
        return tuple(available)
    if not can_pin():
        raise ConfigError("--cores: this system cannot pin processes to cores")
    for name in named:
        if not name.isdecimal() or int(name) not in available:
            raise ConfigError(f"--cores: {name} is not one of the cores here: {', '.join(map(str, available))}")
    return tuple(sorted({int(name) for name in named}))


def _keep_away_from(cores: tuple[int, ...]) -> None:
    """Leave the servers' cores to them, where there are others for this client."""
    others = set(available_cores()) - set(cores)
    if others and can_pin():
        os.sched_setaffinity(0, others)


def _cache_settings(config: CompareConfig) -> CacheSettings:
    return dataclasses.replace(config.engine.cache, enable_prefix_caching=config.contestants.prefix_caching)


def _measure(
    config: CompareConfig, scenarios: Sequence[Scenario], plans: Sequence[ServerPlan], cores: tuple[int, ...]
) -> Results:
    measurer = Measurer(TargetSettings(), load_named_tokenizer(config.engine.model.model), config.output.progress)
    model = config.engine.model
    results = Results(
        summaries={scenario.name: {plan.name: [] for plan in plans} for scenario in scenarios},
        start_times_s={plan.name: [] for plan in plans},
        costs=load_costs(model.model, model.dtype),
        rates=measure_pinned_rates(cores, model.model, model.dtype, config.compare.floor_seconds),
    )
    for round_index in range(config.compare.rounds):
        # Everybody is first once: whoever follows a warm machine follows it in another place each round.
        first = round_index % len(plans)
        for plan in [*plans[first:], *plans[:first]]:
            print(f"round {round_index + 1} of {config.compare.rounds}: {plan.name}", flush=True)
            with running(plan, cores) as server:
                results.start_times_s[plan.name].append(server.start_s)
                served_name = find_model(server.url, None)
                for scenario in scenarios:
                    measurement = measurer.measure(
                        server.url,
                        served_name,
                        scenario.workload,
                        scenario.load,
                        round_index=round_index,
                        label=f"{plan.name}, {scenario.name}",
                    )
                    results.summaries[scenario.name][plan.name].append(measurement.summary)
    return results


def _describe(results: Results, cores: Sequence[int]) -> dict[str, Any]:
    return {
        "cores": list(cores),
        "rates": None if results.rates is None else dataclasses.asdict(results.rates),
        "start_times_s": results.start_times_s,
        "scenarios": {
            scenario: {name: [describe_summary(summary) for summary in rounds] for name, rounds in by_name.items()}
            for scenario, by_name in results.summaries.items()
        },
    }
