"""Log probabilities of the unmodified distribution, with a fixed order among equals."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.protocol import TokenLogprobs


def build_token_logprobs(logits_V: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Logprob of one token and the likeliest alternatives at its position.

    Args:
        logits_V: [V] float32, as the model gave them.
        token_id: the token that stands there.
        num_top: how many alternatives, 0 for none.
    """
    logprobs_V = torch.log_softmax(logits_V, dim=-1)
    rank = 1 + int((logits_V > logits_V[token_id]).sum())
    top_ids = _find_top_ids(logits_V, num_top)
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(logprobs_V[token_id]),
        rank=rank,
        top_ids=top_ids,
        top_logprobs=logprobs_V[top_ids].tolist() if top_ids else [],
    )


def _find_top_ids(logits_V: Tensor, num_top: int) -> list[int]:
    """Ids of the largest logits, best first; lower ids first among equals (topk alone promises no order)."""
    if num_top == 0:
        return []
    threshold = torch.topk(logits_V, num_top).values[-1]
    candidates = (logits_V >= threshold).nonzero().flatten()
    order = torch.sort(logits_V[candidates], descending=True, stable=True).indices
    ids: list[int] = candidates[order[:num_top]].tolist()
    return ids
