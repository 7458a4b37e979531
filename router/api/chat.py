"""Answers of ``/v1/chat/completions``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pdserve.router.api.answers import Envelope
from pdserve.router.api.logprobs import describe_chat_logprobs, describe_prompt_logprobs
from pdserve.router.api.prepare import PreparedRequest
from pdserve.router.choice import ChoiceDelta
from pdserve.text.tokenizer import Tokenizer

_OBJECT = "chat.completion"
_CHUNK_OBJECT = "chat.completion.chunk"


@dataclass(slots=True)
class _Collected:
    """One choice as far as it has come, for an answer that is not streamed."""

    text: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatAnswer:
    """One answer. Use once.

    Args:
        envelope: around each object.
        tokenizer: spells tokens.
        request: what was asked for.
        wants_logprobs: whether choices have logprobs.
    """

    def __init__(
        self, envelope: Envelope, tokenizer: Tokenizer, request: PreparedRequest, *, wants_logprobs: bool
    ) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._request = request
        self._wants_logprobs = wants_logprobs
        self._collected = [_Collected() for _ in range(request.n)]
        self._begun: set[int] = set()
        self._prompt_logprobs: list[dict[str, Any] | None] | None = None

    def chunks(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """The role in front of a choice's first text, then one object for each delta with anything to show."""
        chunks: list[dict[str, Any]] = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            chunks.append(self._chunk(delta.index, {"role": "assistant", "content": ""}))
        logprobs = self._describe_logprobs(delta)
        if delta.text or logprobs or delta.finish_reason is not None:
            content = {"content": delta.text} if delta.text else {}
            chunk = self._chunk(delta.index, content, delta.finish_reason, delta.stop_reason)
            if logprobs is not None:
                chunk["choices"][0]["logprobs"] = {"content": logprobs, "refusal": None}
            chunks.append(chunk)
        return chunks

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The streamed object with the usage."""
        return {**self._envelope.wrap(_CHUNK_OBJECT, []), "usage": usage}

    def take(self, delta: ChoiceDelta) -> None:
        """Collect a delta."""
        collected = self._collected[delta.index]
        collected.text.append(delta.text)
        collected.logprobs += self._describe_logprobs(delta) or ()
        collected.finish_reason, collected.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = describe_prompt_logprobs(self._tokenizer, delta.prompt_logprobs)

    def whole(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(collected.text), "refusal": None},
                "logprobs": {"content": collected.logprobs, "refusal": None} if self._wants_logprobs else None,
                "finish_reason": collected.finish_reason,
                "stop_reason": collected.stop_reason,
            }
            for index, collected in enumerate(self._collected)
        ]
        answer = {**self._envelope.wrap(_OBJECT, choices), "usage": usage}
        if self._prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs
        return answer

    def _describe_logprobs(self, delta: ChoiceDelta) -> list[dict[str, Any]] | None:
        if not self._wants_logprobs:
            return None
        return describe_chat_logprobs(self._tokenizer, delta.logprobs or ())

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }
        chunk = self._envelope.wrap(_CHUNK_OBJECT, [choice])
        if self._request.include_usage:
            chunk["usage"] = None
        return chunk
