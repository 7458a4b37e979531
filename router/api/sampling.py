"""From a client's fields to `SamplingParams`: absent stays absent.

Bounds of single fields are part of their types (`pdserve.router.api.request_types`).
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from pdserve.protocol import GrammarSpec, SamplingParams
from pdserve.router.api.request_types import GenerationFields

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


def build_sampling(
    fields: GenerationFields, *, max_tokens: int | None, logprobs: int | None, grammar: GrammarSpec | None
) -> SamplingParams:
    """The sampling parameters of the request's first choice, seed included.

    Args:
        fields: what the client sent.
        max_tokens: as the endpoint derives it.
        logprobs: as the endpoint derives it.
        grammar: as the endpoint derives it.
    """
    given: dict[str, Any] = {name: getattr(fields, name) for name in _SAME_NAMES}
    return SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        grammar=grammar,
        seed=secrets.randbits(62) if fields.seed is None else fields.seed,
        stop=(fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ()),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        logit_bias={int(key): value for key, value in (fields.logit_bias or {}).items()} or None,
        **{name: value for name, value in given.items() if value is not None},
    )


def with_seed_of_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """The parameters of choice ``index`` of a prompt: seed + index, so that each choice can be had again by itself."""
    assert sampling.seed is not None
    if index == 0:
        return sampling
    seed = sampling.seed + index
    return msgspec.structs.replace(sampling, seed=seed if seed in _INT64 else seed - 2**64)
