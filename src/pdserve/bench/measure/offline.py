"""Drives an engine core in this process and times each of its steps."""

from __future__ import annotations

import dataclasses
import os
import random
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tqdm import tqdm

from pdserve.bench.measure.model_floors import ModelCosts
from pdserve.bench.measure.samples import Failure, RequestSample
from pdserve.checkpoint import prepare_tokenizer, resolve_model
from pdserve.engine.config import ConnectorSettings, EngineConfig
from pdserve.engine.core import EngineCore
from pdserve.engine.models.config import ModelConfig
from pdserve.errors import ConfigError, RequestError
from pdserve.protocol import AddRequest, RequestOutput, Role, SamplingParams

WEIGHT_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class StepTime:
    """One engine step.

    Attributes:
        seconds: scheduling, computing and updating together.
        num_tokens: tokens that came out of it.
        is_decode: whether every request had its first token before it began.
    """

    seconds: float
    num_tokens: int
    is_decode: bool


@dataclass(slots=True)
class OfflineResult:
    """A run's requests and steps."""

    samples: list[RequestSample]
    steps: list[StepTime] = field(default_factory=list)

    @property
    def decode_steps(self) -> list[StepTime]:
        """The steps that computed no prompt token."""
        return [step for step in self.steps if step.is_decode]


def build_core(config: EngineConfig) -> EngineCore:
    """An engine without a connector, of the kind that serves.

    Raises:
        ConfigError: a setting or the model is wrong.
    """
    config = dataclasses.replace(config, connector=ConnectorSettings(connector="null"))
    return EngineCore.build(config, role=Role.DECODE, engine_id=f"bench-{os.getpid()}-{secrets.token_hex(4)}")


def load_costs(model: str, dtype: str) -> ModelCosts:
    """What a token of ``model`` costs when computed in ``dtype``.

    Raises:
        ConfigError: the model is not there or not supported.
    """
    return ModelCosts.of(ModelConfig.from_directory(prepare_tokenizer(resolve_model(model))), WEIGHT_BYTES[dtype])


def build_requests(core: EngineCore, lengths: Sequence[tuple[int, int]], seed: int) -> list[AddRequest]:
    """Requests of random tokens, none with a prefix in common with another, answered in full length.

    Args:
        core: the engine that will run them.
        lengths: of prompt and answer, in tokens.
        seed: equal seeds give equal prompts.

    Raises:
        ConfigError: one of them does not fit the engine.
    """
    generator = random.Random(seed)
    requests = []
    for index, (prompt_len, output_len) in enumerate(lengths):
        ids = [generator.randrange(core.limits.vocab_size) for _ in range(prompt_len)]
        sampling = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True, seed=index)
        requests.append(AddRequest(request_id=f"bench-{seed}-{index}", prompt_token_ids=ids, sampling=sampling))
        try:
            core.validate(requests[-1])
        except RequestError as error:
            raise ConfigError(f"a request of {prompt_len} + {output_len} tokens cannot run: {error.message}") from None
    return requests


def run_offline(core: EngineCore, requests: Sequence[AddRequest], bar: tqdm[None] | None = None) -> OfflineResult:
    """Run requests that are all there from the beginning.

    Args:
        core: an idle engine.
        requests: to run.
        bar: moves with each request that ends.
    """
    run = _Run(core, requests, bar)
    try:
        while run.live:
            run.step()
    finally:
        core.abort_requests(run.live)
    return run.result


class _Run:
    """Requests under way in an engine."""

    def __init__(self, core: EngineCore, requests: Sequence[AddRequest], bar: tqdm[None] | None) -> None:
        self._core = core
        self._bar = bar
        self._waiting = list(reversed(requests))
        self._prompt_lens = {request.request_id: len(request.prompt_token_ids) for request in requests}
        self._num_without_token = len(requests)
        self._start_s = time.perf_counter()
        self.live = {request.request_id: RequestSample(i, 0.0, 0.0, 0.0) for i, request in enumerate(requests)}
        self.result = OfflineResult(list(self.live.values()))

    def step(self) -> None:
        """Fill the engine's queue, run one step and note what came of it."""
        max_queue_len = self._core.config.scheduler.max_queue_len
        while self._waiting and self._core.get_load().num_waiting < max_queue_len:
            self._core.add_request(self._waiting.pop())
        is_decode = self._num_without_token == 0
        begun_s = time.perf_counter()
        outputs = self._core.step()
        ended_s = time.perf_counter()
        for output in outputs:
            self._take(output, ended_s - self._start_s)
        num_tokens = sum(len(output.new_token_ids) for output in outputs)
        self.result.steps.append(StepTime(ended_s - begun_s, num_tokens, is_decode))

    def _take(self, output: RequestOutput, now_s: float) -> None:
        sample = self.live[output.request_id]
        self._num_without_token -= bool(output.new_token_ids and not sample.event_times_s)
        sample.event_times_s += [now_s] * len(output.new_token_ids)
        if output.finish_reason is None:
            return
        sample.end_s = now_s
        sample.num_prompt_tokens = self._prompt_lens[output.request_id]
        sample.num_output_tokens, sample.has_usage = len(sample.event_times_s), True
        if output.error is not None:
            sample.failure = Failure(output.error.code, output.error.message)
        del self.live[output.request_id]
        if self._bar is not None:
            self._bar.update(1)
