"""What makes a tokenised request valid: the one place where ranges are checked, for the router and for ``LLM``.

A request that passes is one that an engine with these limits can run to its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from pdserve.errors import ContextLengthError, RequestError
from pdserve.grammars import check_grammar
from pdserve.protocol import AddRequest, InstanceLimits, SamplingParams

MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
_INTEGERS = ("max_tokens", "min_tokens", "top_k", "seed")

_Range = tuple[Callable[[float], bool], str]
_RANGES: dict[str, _Range] = {
    "temperature": (lambda v: v >= 0.0, "at least 0"),
    "top_p": (lambda v: 0.0 < v <= 1.0, "above 0 and at most 1"),
    "min_p": (lambda v: 0.0 <= v <= 1.0, "between 0 and 1"),
    "top_k": (lambda v: v >= -1, "-1 or 0 (all tokens), or at least 1"),
    "repetition_penalty": (lambda v: v > 0.0, "above 0"),
    "presence_penalty": (lambda v: -2.0 <= v <= 2.0, "between -2 and 2"),
    "frequency_penalty": (lambda v: -2.0 <= v <= 2.0, "between -2 and 2"),
    "min_tokens": (lambda v: v >= 0, "at least 0"),
}


def check_sampling(params: SamplingParams, limits: InstanceLimits) -> None:
    """Check the sampling parameters.

    Raises:
        RequestError: names the parameter, its value and what is accepted.
    """
    _check_ranges(params)
    if params.max_tokens is not None:
        if params.max_tokens < 1:
            raise RequestError(f"max_tokens is {params.max_tokens}; it must be at least 1", param="max_tokens")
        if params.min_tokens > params.max_tokens:
            raise RequestError(
                f"min_tokens is {params.min_tokens}, more than max_tokens, {params.max_tokens}", param="min_tokens"
            )
    _check_logprobs("logprobs", params.logprobs, limits)
    _check_logprobs("prompt_logprobs", params.prompt_logprobs, limits)
    _check_token_ids("stop_token_ids", params.stop_token_ids, limits.vocab_size, MAX_STOP_TOKEN_IDS)
    bias = params.logit_bias or {}
    _check_token_ids("logit_bias", tuple(bias), limits.vocab_size, MAX_LOGIT_BIAS)
    for token_id, value in bias.items():
        if not -100.0 <= value <= 100.0:
            raise RequestError(
                f"logit_bias of token {token_id} is {value}; it must be between -100 and 100", param="logit_bias"
            )
    if any(not text for text in params.stop):
        raise RequestError("stop holds an empty string; leave it out", param="stop")
    if params.grammar is not None:
        if params.ignore_eos:
            raise RequestError("ignore_eos cannot be set beside a grammar, which has an end", param="ignore_eos")
        check_grammar(params.grammar)


def check_request(request: AddRequest, limits: InstanceLimits) -> None:
    """Check a tokenised request.

    Raises:
        RequestError: an empty prompt, a token id outside the vocabulary, a sampling parameter out of range, a draw
            without a seed.
        ContextLengthError: no room for one more token behind prompt and output so far.
    """
    if not request.prompt_token_ids:
        raise RequestError("the prompt is empty; it must hold at least one token", param="prompt")
    _check_token_ids("prompt", request.prompt_token_ids, limits.vocab_size)
    _check_token_ids("output_token_ids", request.output_token_ids, limits.vocab_size)
    check_length(len(request.prompt_token_ids) + len(request.output_token_ids), None, limits)
    if request.timeout_s is not None and not request.timeout_s > 0:
        raise RequestError(f"timeout_s is {request.timeout_s}; it must be above 0", param="timeout_s")
    check_sampling(request.sampling, limits)
    if request.sampling.seed is None and request.sampling.temperature > 0:
        raise RequestError("seed is missing; a request with a temperature above 0 needs one here", param="seed")


def check_length(num_prompt_tokens: int, max_tokens: int | None, limits: InstanceLimits) -> None:
    """Check that a prompt, and the answer asked for, fit the context.

    Raises:
        ContextLengthError: names the lengths and the limit.
    """
    limit = limits.max_model_len
    if num_prompt_tokens >= limit:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens; this service takes at most {limit} tokens of prompt and "
            "answer together, so at most "
            f"{limit - 1} of prompt",
            param="prompt",
        )
    if max_tokens is not None and num_prompt_tokens + max_tokens > limit:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, together more than the "
            f"{limit} tokens this service takes; ask for at most {limit - num_prompt_tokens}",
            param="max_tokens",
        )


def _check_ranges(params: SamplingParams) -> None:
    """Each number by itself; integers first, for those too large for the wire are too large for a float too."""
    for name in _INTEGERS:
        number = getattr(params, name)
        if number is not None and not -(2**63) <= number < 2**63:
            raise RequestError(f"{name} is {number}; it must fit into 64 bits", param=name)
    for name, (is_valid, accepted) in _RANGES.items():
        value = getattr(params, name)
        if not math.isfinite(value) or not is_valid(value):
            raise RequestError(f"{name} is {value}; it must be {accepted}", param=name)


def _check_logprobs(name: str, value: int | None, limits: InstanceLimits) -> None:
    if value is not None and not 0 <= value <= limits.max_logprobs:
        raise RequestError(f"{name} is {value}; it must be between 0 and {limits.max_logprobs}", param=name)


def _check_token_ids(
    name: str, token_ids: list[int] | tuple[int, ...], vocab_size: int, max_count: int | None = None
) -> None:
    if max_count is not None and len(token_ids) > max_count:
        raise RequestError(f"{name} has {len(token_ids)} entries; at most {max_count} are taken", param=name)
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(t for t in token_ids if not 0 <= t < vocab_size)
        raise RequestError(f"{name} holds token id {wrong}; this model's ids go from 0 to {vocab_size - 1}", param=name)
