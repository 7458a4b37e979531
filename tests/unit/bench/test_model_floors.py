from __future__ import annotations

import pytest
import torch

from pdserve.bench.measure.machine_rates import measure_rates
from pdserve.bench.measure.model_floors import MachineRates, ModelCosts
from pdserve.bench.measure.offline import load_costs

RATES = MachineRates(num_threads=1, read_bytes_per_s=20e9, copy_bytes_per_s=10e9, flops=200e9)


@pytest.fixture(scope="module")
def costs() -> ModelCosts:
    return load_costs("smollm2-135m-instruct", "bfloat16")


def test_what_the_default_model_costs(costs: ModelCosts) -> None:
    per_layer = 576 * (576 + 192 + 192 + 576) + 3 * 576 * 1536
    assert costs.body_weights == 30 * per_layer
    assert costs.head_weights == 49152 * 576
    assert costs.step_bytes == 2 * (30 * per_layer + 49152 * 576)
    assert costs.kv_bytes_per_token == 23_040
    assert load_costs("smollm2-135m-instruct", "float32").step_bytes == 2 * costs.step_bytes


def test_a_prompt_costs_its_weights_and_half_a_square_of_attention(costs: ModelCosts) -> None:
    assert costs.prefill_flops(1000) == 2 * costs.body_weights * 1000 + 2 * 30 * 576 * 1000**2 + 2 * costs.head_weights
    assert costs.prefill_flops(1000) == pytest.approx(247e9, rel=0.01)


def test_a_small_batch_waits_for_memory_and_a_large_one_for_arithmetic(costs: ModelCosts) -> None:
    alone = costs.decode_step_floor_s(RATES, 1, 0)
    assert alone == costs.step_bytes / 20e9 == pytest.approx(13.4e-3, rel=0.01)
    assert costs.decode_step_floor_s(RATES, 1, 1000) == pytest.approx(alone + 1000 * 23_040 / 20e9)
    many = costs.decode_step_floor_s(RATES, 64, 100)
    assert many == 64 * (2 * (costs.body_weights + costs.head_weights) + 4 * 30 * 576 * 100) / 200e9
    assert many > alone


def test_whole_requests_cost_their_prompts_and_their_steps(costs: ModelCosts) -> None:
    prefill_s = costs.prefill_floor_s(RATES, 200)
    assert costs.batch_floor_s(RATES, [200] * 4, [1] * 4, 2) == pytest.approx(4 * prefill_s)
    step_s = costs.decode_step_floor_s(RATES, 2, 200 + 65 / 2)
    assert costs.batch_floor_s(RATES, [200] * 4, [65] * 4, 2) == pytest.approx(4 * prefill_s + 128 * step_s)
    # More slots than requests help nobody.
    all_at_once = costs.batch_floor_s(RATES, [200] * 4, [65] * 4, 4)
    assert costs.batch_floor_s(RATES, [200] * 4, [65] * 4, 64) == all_at_once


def test_rates_are_measured_and_torch_is_left_as_it_was() -> None:
    before = torch.get_num_threads()
    rates = measure_rates(1, 0.0, torch.bfloat16)
    assert torch.get_num_threads() == before
    assert rates.num_threads == 1
    assert min(rates.read_bytes_per_s, rates.copy_bytes_per_s, rates.flops) > 1e8
    assert rates.read_bytes_per_s > rates.copy_bytes_per_s
