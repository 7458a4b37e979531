"""Reads one streamed answer: counts what carried text, and decides whether the answer came whole.

Knows the events of ``/v1/completions`` and ``/v1/chat/completions``; knows nothing of sockets or clocks: the caller
says when bytes arrived.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdserve.bench.client.sse import SSEParser
from pdserve.bench.measure.samples import Failure, RequestSample

_DONE = b"[DONE]"
_MAX_MESSAGE_CHARS = 200


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_text(self) -> bool:
        delta = self.delta
        if delta is not None:
            return bool(delta.content or delta.reasoning_content or delta.reasoning)
        return bool(self.text)


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Event)


class AnswerReader:
    """One answer under way; fills in ``sample``.

    Args:
        sample: gets event times and token counts.
        max_tokens: the length asked for.
        is_full_length: whether every answer has that length (EOS is ignored).
    """

    def __init__(self, sample: RequestSample, max_tokens: int, *, is_full_length: bool) -> None:
        self._sample = sample
        self._max_tokens = max_tokens
        self._is_full_length = is_full_length
        self._parser = SSEParser()
        self._finish_reason: str | None = None
        self._usage: _Usage | None = None
        self._is_done = False

    def take(self, chunk: bytes, now_s: float) -> Failure | None:
        """Read what arrived at ``now_s``; a failure means that the answer is lost and reading should stop."""
        for data in self._parser.feed(chunk):
            if data == _DONE:
                self._is_done = True
                continue
            try:
                event = _decoder.decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                return Failure("malformed_event", f"an event is not what the API says: {error}")
            if event.error is not None:
                return Failure("stream_error", _shorten(describe_error(event.error)))
            self._take_event(event, now_s)
        return None

    def finish(self) -> Failure | None:
        """Judge the answer once the stream has ended; fills in the sample's counts."""
        sample = self._sample
        num_events = len(sample.event_times_s)
        if self._finish_reason is None or not self._parser.is_between_events:
            return Failure("cut_short", "the stream ended without a finish reason")
        if not self._is_done:
            return Failure("cut_short", "the stream ended without [DONE]")
        num_tokens = num_events
        if self._usage is not None and self._usage.completion_tokens is not None:
            sample.has_usage = True
            sample.num_prompt_tokens = self._usage.prompt_tokens
            num_tokens = self._usage.completion_tokens
        sample.num_output_tokens = num_tokens
        if num_events > num_tokens:
            return Failure("count_mismatch", f"{num_events} events carried text, but usage says {num_tokens} tokens")
        return self._check_length(num_tokens)

    def _check_length(self, num_tokens: int) -> Failure | None:
        # Without usage a token that shows no text of its own cannot be told from one that is missing.
        if not self._sample.has_usage:
            return None
        is_due = self._is_full_length or self._finish_reason == "length"
        if num_tokens > self._max_tokens:
            return Failure("count_mismatch", f"usage says {num_tokens} tokens where {self._max_tokens} were asked for")
        if is_due and num_tokens < self._max_tokens:
            return Failure(
                "cut_short", f"{num_tokens} of {self._max_tokens} tokens came, finish reason {self._finish_reason}"
            )
        return None

    def _take_event(self, event: _Event, now_s: float) -> None:
        sample = self._sample
        sample.end_s = now_s
        self._usage = event.usage or self._usage
        for choice in event.choices:
            self._finish_reason = choice.finish_reason or self._finish_reason
            # An answer whose tokens show no text at all still ends at a moment.
            if choice.has_text or (choice.finish_reason and not sample.event_times_s):
                sample.event_times_s.append(now_s)


def describe_error(error: Any) -> str:
    """An error object's message, in whichever of the usual shapes it comes."""
    if isinstance(error, dict):
        inner = error.get("error", error)
        error = inner.get("message", inner) if isinstance(inner, dict) else inner
    return str(error)


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[: _MAX_MESSAGE_CHARS - 1] + "…"


def describe_refusal(status: int, body: bytes) -> Failure:
    """The failure of a request that got another status than 200."""
    try:
        message = describe_error(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = body.decode("utf-8", errors="replace").strip() or "no body"
    return Failure(f"http_{status}", _shorten(message))
