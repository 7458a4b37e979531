"""Changes to a row of logits before a token is chosen: penalties, bias, tokens that may not come.

All of it is rebuilt from the token ids each time; there is no state to lose. Definitions are the field's:
repetition penalty over prompt and output (Keskar et al., 2019, CTRL), presence and frequency over the output
(the OpenAI API reference).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.protocol import SamplingParams


def needs_processing(params: SamplingParams, num_output_tokens: int) -> bool:
    """Whether `process_logits` would change anything, a grammar apart."""
    return bool(
        params.logit_bias
        or num_output_tokens < params.min_tokens
        or params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def process_logits(
    logits_V: Tensor,
    params: SamplingParams,
    token_ids: NDArray[np.int32],
    num_prompt_tokens: int,
    eos_token_ids: frozenset[int],
    allowed_V: Tensor | None = None,
) -> Tensor:
    """A changed copy of one row.

    Args:
        logits_V: [V] float32.
        params: the request's parameters.
        token_ids: prompt and output so far.
        num_prompt_tokens: how many of them are the prompt.
        eos_token_ids: held back until ``min_tokens``, like the request's own stop tokens.
        allowed_V: [V] bool, what the request's grammar allows, at least one; None = everything.

    Returns:
        [V] float32.
    """
    logits_V = logits_V.clone()
    tokens = torch.from_numpy(token_ids.astype(np.int64))
    _apply_repetition(logits_V, params.repetition_penalty, tokens)
    _apply_presence_and_frequency(logits_V, params, tokens[num_prompt_tokens:])
    if params.logit_bias:
        bias = params.logit_bias
        ids = torch.tensor(list(bias), dtype=torch.int64)
        logits_V[ids] += torch.tensor(list(bias.values()), dtype=torch.float32)
    if allowed_V is not None:
        logits_V.masked_fill_(~allowed_V, -torch.inf)
    if len(token_ids) - num_prompt_tokens < params.min_tokens:
        held_back = set(params.stop_token_ids) if params.ignore_eos else eos_token_ids | set(params.stop_token_ids)
        _hold_back(logits_V, torch.tensor(sorted(held_back), dtype=torch.int64))
    return logits_V


def _hold_back(logits_V: Tensor, token_ids: Tensor) -> None:
    """Tokens that end the request, unless the answer is whole by its grammar and nothing else may come."""
    values = logits_V[token_ids]
    logits_V[token_ids] = -torch.inf
    if bool((logits_V == -torch.inf).all()):
        logits_V[token_ids] = values


def _apply_repetition(logits_V: Tensor, penalty: float, tokens: Tensor) -> None:
    if penalty == 1.0:
        return
    seen = torch.unique(tokens)
    values = logits_V[seen]
    logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)


def _apply_presence_and_frequency(logits_V: Tensor, params: SamplingParams, output: Tensor) -> None:
    if (params.presence_penalty == 0.0 and params.frequency_penalty == 0.0) or len(output) == 0:
        return
    seen, counts = torch.unique(output, return_counts=True)
    logits_V[seen] -= params.presence_penalty + params.frequency_penalty * counts.to(torch.float32)
