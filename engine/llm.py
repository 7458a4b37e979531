"""Offline generation: a list of prompts in, their completions out, no server.

The same engine core as the service runs, with the null connector; so its tokens are the ones the service gives.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

import msgspec
from tqdm import tqdm

from pdserve.checkpoint import prepare_tokenizer, resolve_model
from pdserve.engine.config import ModelSettings, build_config
from pdserve.engine.core import EngineCore
from pdserve.errors import PdserveError, RequestError
from pdserve.protocol import AddRequest, FinishReason, RequestOutput, Role, SamplingParams, TokenLogprobs
from pdserve.text import TextStream, load_tokenizer


@dataclass(slots=True)
class Completion:
    """What one prompt gave.

    Attributes:
        prompt: the prompt as text; None when it was given as token ids.
        prompt_token_ids: the prompt's tokens.
        text: the answer.
        token_ids: the answer's tokens, up to and including the one that ended it.
        finish_reason: ``stop`` or ``length``.
        logprobs: one entry a token, where asked for.
        prompt_logprobs: one entry for each prompt token from the second on, where asked for.
        num_cached_tokens: prompt tokens that were prefix hits.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0


class LLM:
    """A model in this process.

    Args:
        model: as after ``--model``.
        settings: any setting of the engine by its own name, for example ``dtype="float32"``,
            ``max_num_batched_tokens=256``, ``num_blocks=512``.

    Raises:
        ConfigError: an unknown setting, a bad value, a missing model.
    """

    def __init__(self, model: str = ModelSettings.model, **settings: object) -> None:
        config = build_config(model=model, connector="null", **settings)
        self.tokenizer = load_tokenizer(prepare_tokenizer(resolve_model(model)))
        self._core = EngineCore.build(config, role=Role.DECODE, engine_id=f"llm-{os.getpid()}-{secrets.token_hex(4)}")
        self._num_requests = 0

    @property
    def core(self) -> EngineCore:
        """The engine core beneath, for figures and tests."""
        return self._core

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[Completion]:
        """Complete every prompt, batched as memory and limits allow.

        Args:
            prompts: a text, texts, or lists of token ids.
            sampling_params: one for all, or one for each prompt; default: ``SamplingParams()``.
            use_tqdm: show a progress bar.

        Returns:
            Completions in the order of the prompts.

        Raises:
            RequestError: a prompt or parameter is wrong; nothing is generated then.
            EngineError: the engine failed on a request.
        """
        prompt_list: list[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else list(prompts)
        params_list = self._match_params(sampling_params, len(prompt_list))
        runs = [self._prepare(prompt, params) for prompt, params in zip(prompt_list, params_list, strict=True)]
        for run in runs:
            self._core.validate(run.message)
        with tqdm(total=len(runs), disable=not use_tqdm, unit="prompt", desc="generate") as bar:
            self._run(runs, bar)
        return [run.completion for run in runs]

    def close(self) -> None:
        """Release the engine; idempotent."""
        self._core.close()

    def __enter__(self) -> LLM:
        """The LLM itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    @staticmethod
    def _match_params(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        if len(params) != count:
            raise RequestError(f"{len(params)} sampling_params for {count} prompts; give one, or one for each")
        return params

    def _prepare(self, prompt: str | Sequence[int], params: SamplingParams) -> _Run:
        text = prompt if isinstance(prompt, str) else None
        token_ids = self.tokenizer.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else list(prompt)
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbits(63))
        self._num_requests += 1
        message = AddRequest(request_id=f"llm-{self._num_requests}", prompt_token_ids=token_ids, sampling=params)
        completion = Completion(text, token_ids)
        if params.logprobs is not None:
            completion.logprobs = []
        return _Run(message, completion, TextStream(self.tokenizer, token_ids, params))

    def _run(self, runs: Sequence[_Run], bar: tqdm[None]) -> None:
        waiting = list(reversed(runs))
        live: dict[str, _Run] = {}
        settings = self._core.config.scheduler
        max_live, max_waiting = settings.max_num_seqs * 2, settings.max_queue_len
        try:
            while waiting or live:
                while waiting and len(live) < max_live and self._core.get_load().num_waiting < max_waiting:
                    run = waiting.pop()
                    live[run.message.request_id] = run
                    self._core.add_request(run.message)
                for output in self._core.step():
                    run = live[output.request_id]
                    if run.take(output):
                        del live[output.request_id]
                        self._core.abort_requests([output.request_id])
                        bar.update(1)
        finally:
            self._core.abort_requests(live)


@dataclass(slots=True)
class _Run:
    """One prompt under way."""

    message: AddRequest
    completion: Completion
    stream: TextStream

    def take(self, output: RequestOutput) -> bool:
        """Add a step's output; True when the completion is whole."""
        if output.error is not None:
            raise _error_from(output)
        completion = self.completion
        is_stop = output.finish_reason is FinishReason.STOP
        delta = self.stream.push(output.new_token_ids, ends_with_stop_token=is_stop)
        completion.text += delta.text
        completion.token_ids += output.new_token_ids[: delta.num_tokens_used]
        if output.logprobs and completion.logprobs is not None:
            completion.logprobs += output.logprobs[: delta.num_tokens_used]
        if output.prompt_logprobs is not None:
            completion.prompt_logprobs = output.prompt_logprobs
        completion.num_cached_tokens += output.num_cached_tokens
        if delta.stop_string is not None:
            completion.finish_reason = FinishReason.STOP
            return True
        if output.finish_reason is not None:
            completion.text += self.stream.flush()
            completion.finish_reason = output.finish_reason
        return output.finish_reason is not None


def _error_from(output: RequestOutput) -> PdserveError:
    assert output.error is not None
    error = PdserveError(output.error.message)
    error.code, error.http_status = output.error.code, output.error.http_status
    return error
