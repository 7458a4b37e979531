"""From a client's fields to `SamplingParams`: absent stays absent, and what the API bounds is checked.

Ranges that any use of the engine has are checked by `pdserve.request_checks`; here stand those of the HTTP API.
"""

from __future__ import annotations

import math
import secrets
from typing import Any

import msgspec

from pdserve.errors import RequestError
from pdserve.protocol import SamplingParams
from pdserve.router.api.request_types import GenerationFields

MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 1024
MAX_TEMPERATURE = 2.0
MAX_CACHE_SALT_CHARACTERS = 256
_INT64 = range(-(2**63), 2**63)

_SAME_NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "prompt_logprobs",
)


def build_sampling(fields: GenerationFields, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    """The sampling parameters of the request's first choice, seed included.

    Args:
        fields: what the client sent.
        max_tokens: as the endpoint derives it.
        logprobs: as the endpoint derives it.

    Raises:
        RequestError: a field is out of the API's bounds.
    """
    if fields.temperature is not None and fields.temperature > MAX_TEMPERATURE:
        raise RequestError(
            f"temperature is {fields.temperature}; it must be between 0 and {MAX_TEMPERATURE:g}", param="temperature"
        )
    if fields.seed is not None and fields.seed not in _INT64:
        raise RequestError("seed must fit into 64 bits with sign", param="seed")
    if fields.priority is not None and fields.priority not in _INT64:
        raise RequestError("priority must fit into 64 bits with sign", param="priority")
    if fields.timeout is not None and not 0 < fields.timeout < math.inf:
        raise RequestError(f"timeout is {fields.timeout}; it must be above 0, in seconds", param="timeout")
    if fields.cache_salt is not None and not 0 < len(fields.cache_salt) <= MAX_CACHE_SALT_CHARACTERS:
        raise RequestError(
            f"cache_salt must have between 1 and {MAX_CACHE_SALT_CHARACTERS} characters", param="cache_salt"
        )
    given: dict[str, Any] = {name: getattr(fields, name) for name in _SAME_NAMES}
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        seed=secrets.randbits(62) if fields.seed is None else fields.seed,
        stop=_stop_strings(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        logit_bias=_logit_bias(fields.logit_bias),
        **{name: value for name, value in given.items() if value is not None},
    )


def with_seed_of_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """The parameters of choice ``index`` of a prompt: seed + index, so that each choice can be had again by itself."""
    assert sampling.seed is not None
    if index == 0:
        return sampling
    seed = sampling.seed + index
    return msgspec.structs.replace(sampling, seed=seed if seed in _INT64 else seed - 2**64)


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(strings) > MAX_STOP_STRINGS:
        raise RequestError(f"stop has {len(strings)} strings; at most {MAX_STOP_STRINGS} are taken", param="stop")
    if any(len(text) > MAX_STOP_CHARACTERS for text in strings):
        raise RequestError(f"a stop string may have {MAX_STOP_CHARACTERS} characters at most", param="stop")
    return strings


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    wrong = next((key for key in bias if not (key.isascii() and key.isdigit() and len(key) <= 10)), None)
    if wrong is not None:
        raise RequestError(f"logit_bias has the key {wrong[:32]!r}; keys are token ids", param="logit_bias")
    return {int(key): value for key, value in bias.items()}
