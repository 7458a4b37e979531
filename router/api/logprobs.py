"""Logprobs in the shapes that clients expect: completions', chat's, and the extension for prompts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pdserve.protocol import TokenLogprobs
from pdserve.router.api.answer_types import LogprobCandidate, PromptLogprobs, TokenLogprob
from pdserve.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def describe_completion_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], text_offsets: Iterable[int]
) -> dict[str, list[Any]]:
    """Parallel lists, one item for each token."""
    return {
        "tokens": [spell_token(tokenizer, entry.token_id) for entry in entries],
        "token_logprobs": [_clamp(entry.logprob) for entry in entries],
        "top_logprobs": [
            {spell_token(tokenizer, token_id): logprob for token_id, logprob in _top_and_own(entry)}
            for entry in entries
        ],
        "text_offset": list(text_offsets),
    }


def describe_chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> list[TokenLogprob]:
    """One object for each token, with its bytes and the likeliest alternatives."""
    return [
        {
            **_describe_chat_token(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [
                _describe_chat_token(tokenizer, token_id, logprob)
                for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
            ],
        }
        for entry in entries
    ]


def describe_prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> PromptLogprobs:
    """For each prompt token the candidates by token id; None for the first, which nothing precedes."""
    described: PromptLogprobs = [None]
    for entry in entries:
        ranks = {token_id: rank for rank, token_id in enumerate(entry.top_ids, start=1)}
        ranks[entry.token_id] = entry.rank
        described.append(
            {
                str(token_id): {
                    "logprob": logprob,
                    "rank": ranks[token_id],
                    "decoded_token": tokenizer.token_text(token_id),
                }
                for token_id, logprob in _top_and_own(entry)
            }
        )
    return described


def spell_token(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as text; one that is part of a character as ``bytes:`` and escapes, so that no two look alike."""
    content = tokenizer.token_bytes(token_id)
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _top_and_own(entry: TokenLogprobs) -> list[tuple[int, float]]:
    """The likeliest tokens and the one that stands there, without doubling it."""
    pairs = [(i, _clamp(logprob)) for i, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)]
    if entry.token_id not in entry.top_ids:
        pairs.append((entry.token_id, _clamp(entry.logprob)))
    return pairs


def _describe_chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> LogprobCandidate:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": _clamp(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _clamp(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
