"""What both kinds of answers share: the envelope around each object, and the usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pdserve.router.api.answer_types import Usage
from pdserve.router.api.prepare import PreparedRequest
from pdserve.router.choice import Choice, ChoiceDelta


@dataclass(frozen=True, slots=True)
class Envelope:
    """The fields that every object of one answer has.

    Attributes:
        response_id: of the answer.
        created_s: when it began, seconds since the epoch.
        model: the served name.
        system_fingerprint: of the pool that answers.
    """

    response_id: str
    created_s: int
    model: str
    system_fingerprint: str | None

    def wrap(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """An object with these choices."""
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        }


class Answer(Protocol):
    """Turns deltas into the objects of one endpoint. Use once."""

    def chunks(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """The streamed objects that a delta gives: none, when it has nothing to show yet."""
        ...

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The streamed object with the usage, behind all others."""
        ...

    def take(self, delta: ChoiceDelta) -> None:
        """Collect a delta for `whole`."""
        ...

    def whole(self, usage: Usage) -> dict[str, Any]:
        """The object of an answer that is not streamed."""
        ...


def build_usage(request: PreparedRequest, choices: Sequence[Choice]) -> Usage:
    """Tokens of the request: each prompt counts once, whatever n is."""
    num_prompt_tokens = request.num_prompt_tokens
    num_output_tokens = sum(choice.num_output_tokens for choice in choices)
    num_cached_tokens = sum(
        min(choices[index * request.best_of].num_cached_tokens, len(prompt.token_ids))
        for index, prompt in enumerate(request.prompts)
    )
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
