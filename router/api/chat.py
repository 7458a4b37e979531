"""Answers of ``/v1/chat/completions``."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.router.api.answer_types import (
    ChatDelta,
    ChatMessage,
    PromptLogprobs,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from pdserve.router.api.answers import Envelope
from pdserve.router.api.logprobs import describe_chat_logprobs, describe_prompt_logprobs
from pdserve.router.api.prepare import PreparedRequest
from pdserve.router.choice import ChoiceDelta
from pdserve.text.message import MessageDelta, MessageReader
from pdserve.text.tokenizer import Tokenizer

_OBJECT = "chat.completion"
_CHUNK_OBJECT = "chat.completion.chunk"
_CALL_ID_CHARACTERS = string.ascii_letters + string.digits
_CALL_ID_LENGTH = 9
"""Mistral's templates take no other."""


@dataclass(slots=True)
class _Message:
    """One choice as far as it has come."""

    reader: MessageReader
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    has_begun: bool = False

    def read(self, delta: ChoiceDelta) -> MessageDelta:
        """What the delta adds to the message."""
        read = self.reader.push(delta.text)
        if delta.finish_reason is not None:
            last = self.reader.finish()
            read = MessageDelta(read.content + last.content, read.reasoning + last.reasoning, read.calls + last.calls)
        return read

    def describe_calls(self, read: MessageDelta) -> list[ToolCallDelta]:
        """The parts of calls, one for each call, also noted in ``calls``."""
        parts: list[ToolCallDelta] = []
        for call in read.calls:
            if call.name is not None:
                call_id = "".join(secrets.choice(_CALL_ID_CHARACTERS) for _ in range(_CALL_ID_LENGTH))
                self.calls.append({"id": call_id, "type": "function", "function": {"name": call.name, "arguments": ""}})
                parts.append(
                    {
                        "index": call.index,
                        "id": call_id,
                        "type": "function",
                        "function": {"name": call.name, "arguments": ""},
                    }
                )
            elif not parts or parts[-1]["index"] != call.index:
                parts.append({"index": call.index, "function": {"arguments": ""}})
            parts[-1]["function"]["arguments"] += call.arguments
            self.calls[call.index]["function"]["arguments"] += call.arguments
        return parts

    def name_end(self, finish_reason: str | None) -> str | None:
        """The finish reason as clients know it: a message that ends by itself and calls tools waits for them."""
        return "tool_calls" if finish_reason == "stop" and self.calls else finish_reason


class ChatAnswer:
    """One answer. Use once.

    Args:
        envelope: around each object.
        tokenizer: spells tokens.
        request: what was asked for.
        readers: one for each choice.
        wants_logprobs: whether choices have logprobs.
    """

    def __init__(
        self,
        envelope: Envelope,
        tokenizer: Tokenizer,
        request: PreparedRequest,
        readers: Sequence[MessageReader],
        *,
        wants_logprobs: bool,
    ) -> None:
        self._envelope = envelope
        self._tokenizer = tokenizer
        self._request = request
        self._wants_logprobs = wants_logprobs
        self._messages = [_Message(reader) for reader in readers]
        self._prompt_logprobs: PromptLogprobs | None = None

    def chunks(self, delta: ChoiceDelta) -> list[dict[str, Any]]:
        """The role in front of a choice's first text, then one object for each delta with anything to show."""
        message = self._messages[delta.index]
        chunks: list[dict[str, Any]] = []
        if not message.has_begun:
            message.has_begun = True
            chunks.append(self._chunk(delta.index, {"role": "assistant", "content": ""}))
        read = message.read(delta)
        shown: ChatDelta = {}
        if read.content:
            shown["content"] = read.content
        if read.reasoning:
            shown["reasoning_content"] = read.reasoning
        if read.calls:
            shown["tool_calls"] = message.describe_calls(read)
        logprobs = self._describe_logprobs(delta)
        if shown or logprobs or delta.finish_reason is not None:
            chunk = self._chunk(delta.index, shown, message.name_end(delta.finish_reason), delta.stop_reason)
            if logprobs is not None:
                chunk["choices"][0]["logprobs"] = {"content": logprobs, "refusal": None}
            chunks.append(chunk)
        return chunks

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """The streamed object with the usage."""
        return {**self._envelope.wrap(_CHUNK_OBJECT, []), "usage": usage}

    def take(self, delta: ChoiceDelta) -> None:
        """Collect a delta."""
        message = self._messages[delta.index]
        read = message.read(delta)
        message.content.append(read.content)
        message.reasoning.append(read.reasoning)
        message.describe_calls(read)
        message.logprobs += self._describe_logprobs(delta) or ()
        message.finish_reason, message.stop_reason = message.name_end(delta.finish_reason), delta.stop_reason
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = describe_prompt_logprobs(self._tokenizer, delta.prompt_logprobs)

    def whole(self, usage: Usage) -> dict[str, Any]:
        """The whole answer."""
        choices = [
            {
                "index": index,
                "message": _describe_message(message),
                "logprobs": {"content": message.logprobs, "refusal": None} if self._wants_logprobs else None,
                "finish_reason": message.finish_reason,
                "stop_reason": message.stop_reason,
            }
            for index, message in enumerate(self._messages)
        ]
        answer = {**self._envelope.wrap(_OBJECT, choices), "usage": usage}
        if self._prompt_logprobs is not None:
            answer["prompt_logprobs"] = self._prompt_logprobs
        return answer

    def _describe_logprobs(self, delta: ChoiceDelta) -> list[TokenLogprob] | None:
        if not self._wants_logprobs:
            return None
        return describe_chat_logprobs(self._tokenizer, delta.logprobs or ())

    def _chunk(
        self,
        index: int,
        delta: ChatDelta,
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


def _describe_message(message: _Message) -> ChatMessage:
    content = "".join(message.content)
    described: ChatMessage = {
        "role": "assistant",
        "content": content if content or not message.calls else None,
        "refusal": None,
    }
    if any(message.reasoning):
        described["reasoning_content"] = "".join(message.reasoning)
    if message.calls:
        described["tool_calls"] = message.calls
    return described
