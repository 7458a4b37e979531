"""The work that `compare` gives every server, and the figures that are compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.bench.measure.model_floors import MachineRates, ModelCosts
from pdserve.bench.measure.summary import Distribution, Summary
from pdserve.bench.workload.lengths import LengthMix
from pdserve.bench.workload.settings import DEFAULT_NUM_REQUESTS, LoadSettings, WorkloadSettings


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a run.

    Attributes:
        name: with its unit.
        read: takes it out of a summary; None where there is none.
        is_more_better: rates, as against times.
        find_possible: the best value that a machine allows, for costs, rates and the scenario it stands in.
    """

    name: str
    read: Callable[[Summary], float | None]
    is_more_better: bool = False
    find_possible: Callable[[ModelCosts, MachineRates, Scenario], float] | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """Requests of a kind, and what they are about.

    Attributes:
        name: on the command line.
        purpose: in a few words.
        workload: the prompts.
        load: when they are sent.
        metrics: what is compared.
    """

    name: str
    purpose: str
    workload: WorkloadSettings
    load: LoadSettings
    metrics: tuple[Metric, ...]

    @property
    def lengths(self) -> tuple[int, int]:
        """Mean length of prompts and of answers, in tokens."""
        prompts = LengthMix.parse(self.workload.prompt_tokens, "--prompt-tokens")
        answers = LengthMix.parse(self.workload.output_tokens, "--output-tokens")
        return round(prompts.mean), round(answers.mean)


def _ms(read: Callable[[Summary], Distribution | None], share: str) -> Callable[[Summary], float | None]:
    def read_ms(summary: Summary) -> float | None:
        values = read(summary)
        return None if values is None else float(getattr(values, share)) * 1000

    return read_ms


def _possible_decode_rate(costs: ModelCosts, rates: MachineRates, scenario: Scenario) -> float:
    prompt_len, output_len = scenario.lengths
    return 1 / costs.decode_step_floor_s(rates, 1, prompt_len + output_len / 2)


def _possible_ttft_ms(costs: ModelCosts, rates: MachineRates, scenario: Scenario) -> float:
    return costs.prefill_floor_s(rates, scenario.lengths[0]) * 1000


def _possible_output_rate(costs: ModelCosts, rates: MachineRates, scenario: Scenario) -> float:
    count = scenario.workload.num_requests or DEFAULT_NUM_REQUESTS
    prompt_len, output_len = scenario.lengths
    limit = scenario.load.max_concurrency or count
    return count * output_len / costs.batch_floor_s(rates, [prompt_len] * count, [output_len] * count, limit)


def _decode_rate(summary: Summary) -> float | None:
    return 1 / summary.tpot_s.p50 if summary.tpot_s is not None and summary.tpot_s.p50 > 0 else None


TTFT_P50 = Metric("TTFT p50, ms", _ms(lambda summary: summary.ttft_s, "p50"))
TTFT_P99 = Metric("TTFT p99, ms", _ms(lambda summary: summary.ttft_s, "p99"))
ITL_P50 = Metric("ITL p50, ms", _ms(lambda summary: summary.itl_s, "p50"))
ITL_P99 = Metric("ITL p99, ms", _ms(lambda summary: summary.itl_s, "p99"))
OUTPUT_RATE = Metric("output tokens/s", lambda summary: summary.output_tokens_per_s, is_more_better=True)
DECODE_RATE = Metric("decode tokens/s", _decode_rate, True, _possible_decode_rate)

# Seeds of their own: KV of one scenario's prompts may lie in a store still when the next one runs.
SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            "decode",
            "one request at a time, 128 tokens of prompt and of answer",
            WorkloadSettings(num_requests=4, prompt_tokens="128", output_tokens="128", seed=1000),
            LoadSettings(max_concurrency=1),
            (DECODE_RATE,),
        ),
        Scenario(
            "prefill",
            "one request at a time, 1,024 tokens of prompt, one of answer",
            WorkloadSettings(num_requests=4, prompt_tokens="1024", output_tokens="1", seed=2000),
            LoadSettings(max_concurrency=1),
            (dataclasses.replace(TTFT_P50, find_possible=_possible_ttft_ms),),
        ),
        Scenario(
            "burst",
            "64 requests at once, 200 + 64 tokens, 32 at a time",
            WorkloadSettings(num_requests=64, prompt_tokens="200", output_tokens="64", seed=3000),
            LoadSettings(max_concurrency=32),
            (dataclasses.replace(OUTPUT_RATE, find_possible=_possible_output_rate),),
        ),
        Scenario(
            "poisson",
            "96 requests of 200 + 64 tokens, 1.6 a second",
            WorkloadSettings(num_requests=96, prompt_tokens="200", output_tokens="64", seed=4000),
            LoadSettings(rate=1.6),
            (TTFT_P50, TTFT_P99, ITL_P50, ITL_P99),
        ),
    )
}

CUSTOM = "custom"
CUSTOM_METRICS = (OUTPUT_RATE, TTFT_P50, TTFT_P99, ITL_P50, ITL_P99)
