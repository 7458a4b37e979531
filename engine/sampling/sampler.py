"""The sampler: logits and the requests' parameters in, one token for each row out.

Each row is chosen on its own, by comparisons with thresholds and one draw, so that neither the batch nor the
order of equal logits in a sort can change a token. Greedy takes the lowest id among equal logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.engine.sampling.draw import draw_uniform
from pdserve.engine.sampling.grammar_masks import GrammarCompiler, GrammarMask
from pdserve.engine.sampling.logprobs import build_token_logprobs
from pdserve.engine.sampling.processors import needs_processing, process_logits
from pdserve.errors import RequestError
from pdserve.kernels.row_maxima import find_row_maxima
from pdserve.protocol import SamplingParams, TokenLogprobs

# Nucleus search looks at this many of the likeliest tokens first, then at more; the answer is the same.
_NUCLEUS_STEPS = (256, 4096)


@dataclass(slots=True)
class SamplingRow:
    """Whose row of logits it is; made once for each request.

    Attributes:
        request_id: whose row it is.
        params: its parameters; the seed is set where the temperature is not 0.
        get_token_ids: gives prompt and output so far, int32.
        num_prompt_tokens: how many of them are the prompt.
        is_plain: whether the row's largest logit decides and nobody asked for more.
        grammar_mask: the place in its grammar, from the first token on that is chosen under it here.
    """

    request_id: str
    params: SamplingParams
    get_token_ids: Callable[[], NDArray[np.int32]]
    num_prompt_tokens: int
    is_plain: bool = field(init=False)
    grammar_mask: GrammarMask | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        params = self.params
        asks_more = params.logprobs is not None or params.grammar is not None or needs_processing(params, 0)
        self.is_plain = params.temperature == 0.0 and not asks_more


@dataclass(slots=True)
class SamplerOutput:
    """Chosen tokens, and logprobs for those that asked.

    Attributes:
        token_ids: one for each row that neither failed nor was refused.
        logprobs: for those that asked.
        failed: rows without a finite maximum, with the reason.
        refused: rows whose grammar cannot be followed any further, with the reason.
    """

    token_ids: dict[str, int] = field(default_factory=dict)
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


class Sampler:
    """Stateless sampler.

    Args:
        eos_token_ids: held back until a request's ``min_tokens``.
        grammars: for requests with a grammar.
    """

    def __init__(self, eos_token_ids: frozenset[int], grammars: GrammarCompiler | None = None) -> None:
        self._eos_token_ids = eos_token_ids
        self._grammars = grammars

    def sample(self, logits_RV: Tensor, rows: Sequence[SamplingRow]) -> SamplerOutput:
        """Choose a token for each row.

        Args:
            logits_RV: [R, V] float32.
            rows: one for each row of the logits.
        """
        output = self.take_likeliest(*find_row_maxima(logits_RV), rows)
        for i, row in enumerate(rows):
            if row.is_plain or row.request_id in output.failed:
                continue
            try:
                token_id = self._sample_row(logits_RV[i], row, output.token_ids[row.request_id])
            except RequestError as error:
                del output.token_ids[row.request_id]
                output.refused[row.request_id] = error.message
                continue
            output.token_ids[row.request_id] = token_id
            if row.params.logprobs is not None:
                output.logprobs[row.request_id] = build_token_logprobs(logits_RV[i], token_id, row.params.logprobs)
        return output

    def take_likeliest(self, token_ids_R: Tensor, logits_R: Tensor, rows: Sequence[SamplingRow]) -> SamplerOutput:
        """The likeliest token for each row, which is all there is to choose where all rows are plain.

        Args:
            token_ids_R: [R] int64.
            logits_R: [R] float32, those tokens' logits; one that is not finite fails its row.
            rows: one for each.
        """
        output = SamplerOutput()
        for row, token_id, logit in zip(rows, token_ids_R.tolist(), logits_R.tolist(), strict=True):
            if math.isfinite(logit):
                output.token_ids[row.request_id] = token_id
            else:
                output.failed[row.request_id] = "the model produced logits that are not finite"
        return output

    def _sample_row(self, logits_V: Tensor, row: SamplingRow, greedy_id: int) -> int:
        params, token_ids = row.params, row.get_token_ids()
        allowed_V = self._find_allowed(row, token_ids)
        # Most of the time a grammar allows what the model likes best, and greedy rows need no more than that.
        is_masked = allowed_V is not None and not (params.temperature == 0.0 and bool(allowed_V[greedy_id]))
        if is_masked or needs_processing(params, len(token_ids) - row.num_prompt_tokens):
            logits_V = process_logits(
                logits_V, params, token_ids, row.num_prompt_tokens, self._eos_token_ids, allowed_V
            )
            greedy_id = int(logits_V.argmax())
        if params.temperature == 0.0:
            return greedy_id
        assert params.seed is not None, "a request that samples has a seed by now"
        return choose_token(logits_V, params, draw_uniform(params.seed, len(token_ids)))

    def _find_allowed(self, row: SamplingRow, token_ids: NDArray[np.int32]) -> Tensor | None:
        """[V] bool, what the row's grammar allows; None where it has none.

        Raises:
            RequestError: the grammar cannot be followed.
        """
        grammar = row.params.grammar
        if grammar is None:
            return None
        if row.grammar_mask is None:
            assert self._grammars is not None, "an engine that takes grammars has a compiler"
            row.grammar_mask = self._grammars.start(grammar)
        return torch.from_numpy(row.grammar_mask.find_allowed(token_ids[row.num_prompt_tokens :]))


def choose_token(logits_V: Tensor, params: SamplingParams, uniform: float) -> int:
    """Sample from one row by inverting the distribution function, in order of token id.

    Args:
        logits_V: [V] float32, at least one finite.
        params: temperature > 0, top_k, top_p, min_p.
        uniform: the draw, in [0, 1).
    """
    scaled_V = (logits_V - logits_V.max()) / params.temperature
    if params.min_p > 0.0:
        scaled_V = _keep_from(scaled_V, math.log(params.min_p))
    if 0 < params.top_k < len(scaled_V):
        scaled_V = _keep_from(scaled_V, float(torch.topk(scaled_V, params.top_k).values[-1]))
    weights_V = scaled_V.exp()
    if params.top_p < 1.0:
        # A running sum, not a tree of partial sums, whose shape would depend on the number of threads.
        total = float(weights_V.cumsum(dim=0, dtype=torch.float64)[-1])
        threshold = _find_nucleus_threshold(scaled_V, total, params.top_p)
        weights_V = weights_V.masked_fill(scaled_V < threshold, 0.0)
    cumulative_V = weights_V.cumsum(dim=0, dtype=torch.float64)
    target = torch.tensor(uniform * float(cumulative_V[-1]), dtype=torch.float64)
    # right=True skips tokens of weight 0: their cumulative weight equals the one before.
    index = int(torch.searchsorted(cumulative_V, target, right=True))
    return min(index, int(weights_V.nonzero()[-1]))


def _keep_from(scaled_V: Tensor, threshold: float) -> Tensor:
    """Tokens below the threshold get no weight; equal ones stay, so order cannot matter."""
    return scaled_V.masked_fill(scaled_V < threshold, -torch.inf)


def _find_nucleus_threshold(scaled_V: Tensor, total: float, top_p: float) -> float:
    """The scaled logit of the last token of the smallest set of likeliest tokens that holds ``top_p`` of the mass."""
    for size in (*_NUCLEUS_STEPS, len(scaled_V)):
        top = torch.topk(scaled_V, min(size, len(scaled_V))).values
        reached = (top.exp().cumsum(dim=0, dtype=torch.float64) >= top_p * total).nonzero()
        if len(reached):
            return float(top[int(reached[0])])
    return float(top[-1])
