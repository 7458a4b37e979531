"""The model runner on a tiny model: greedy tokens do not depend on whether their logits are made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import BLOCK_SIZE, build_reference, save

from pdserve.connectors.null import NullWorker
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.models import load_model
from pdserve.engine.sampling.sampler import Sampler
from pdserve.engine.scheduler_output import ModelRunnerOutput, NewRequest, ScheduledRequest, SchedulerOutput
from pdserve.errors import ConfigError
from pdserve.kernels.registry import backend_names, get_backend
from pdserve.protocol import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
OTHERS = {
    "alone": None,
    "beside a greedy one": GREEDY,
    "beside one that wants logprobs": SamplingParams(temperature=0.0, logprobs=3),
    "beside one that samples": SamplingParams(temperature=1.0, seed=7),
}
PROMPTS = ([5, 9, 77, 3, 24, 60, 61], list(range(20, 41)))
NUM_STEPS = 6


@pytest.fixture(params=backend_names())
def runner(request: pytest.FixtureRequest, tmp_path: Path) -> ModelRunner:
    try:
        backend = get_backend(request.param, torch.bfloat16)
    except ConfigError as error:
        pytest.skip(f"does not run here: {error}")
    model = load_model(save(build_reference("llama-tied"), tmp_path), torch.bfloat16, backend)
    config = model.config
    shape = (8, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    kv_cache = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=backend.device)
    return ModelRunner(
        model, kv_cache, Sampler(frozenset()), NullWorker(), max_num_seqs=8, max_model_len=128, layerwise=False
    )


def run_step(runner: ModelRunner, scheduled: list[ScheduledRequest], new: list[NewRequest]) -> ModelRunnerOutput:
    num_tokens = sum(item.num_scheduled_tokens for item in scheduled)
    return runner.execute_model(SchedulerOutput(tuple(new), tuple(scheduled), (), num_tokens, None, (), ()))


def generate(runner: ModelRunner, name: str, other: SamplingParams | None) -> list[int]:
    """The first prompt's answer, the second prompt beside it if ``other`` says how it is sampled."""
    requests = [(f"{name}-greedy", PROMPTS[0], GREEDY, (0, 1)), (f"{name}-other", PROMPTS[1], other, (4, 2, 7))]
    new = [
        NewRequest(request_id, tuple(prompt), len(prompt), blocks, params, wants_prompt_logprobs=False)
        for request_id, prompt, params, blocks in requests
        if params is not None
    ]
    scheduled = [ScheduledRequest(item.request_id, 0, len(item.token_ids)) for item in new]
    answer = []
    for _ in range(NUM_STEPS):
        output = run_step(runner, scheduled, new)
        assert not output.failed
        assert bool(output.logprobs) == (other is not None and other.logprobs is not None)
        answer.append(output.sampled_token_ids[requests[0][0]])
        scheduled = [
            ScheduledRequest(item.request_id, item.num_computed_tokens + item.num_scheduled_tokens, 1)
            for item in scheduled
        ]
        new = []
    return answer


def test_greedy_tokens_are_the_same_with_logits_and_without(runner: ModelRunner) -> None:
    answers = {name: generate(runner, name, other) for name, other in OTHERS.items()}
    assert len(set(answers["alone"])) > 1
    assert all(answer == answers["alone"] for answer in answers.values()), answers
