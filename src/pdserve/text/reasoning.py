"""Reasoning that a model writes in front of its answer, between ``<think>`` and ``</think>``.

Whitespace behind a tag belongs to nothing. Reasoning that is never closed is all there is.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

from pdserve.text.message import MessageDelta, MessageReader, split_at_tag

REASONING_TAGS: Mapping[str, tuple[str, str]] = MappingProxyType({"think": ("<think>", "</think>")})
"""Opening and closing tag by the parser's name."""


class _State(enum.Enum):
    START = enum.auto()
    INSIDE = enum.auto()
    BEHIND = enum.auto()


class ReasoningReader:
    """Tells reasoning apart and gives the text behind it to another reader.

    Args:
        tags: the opening and the closing one.
        is_open: the prompt ends with the opening tag.
        behind: reads the answer itself.
    """

    def __init__(self, tags: tuple[str, str], *, is_open: bool, behind: MessageReader) -> None:
        self._opening, self._closing = tags
        self._behind = behind
        self._state = _State.INSIDE if is_open else _State.START
        self._held = ""
        self._is_behind_tag = is_open

    def push(self, text: str) -> MessageDelta:
        """What the next piece adds."""
        self._held += text
        reasoning = ""
        if self._state is _State.START:
            self._open()
        if self._state is _State.INSIDE:
            reasoning = self._read_reasoning()
        if self._state is not _State.BEHIND:
            return MessageDelta(reasoning=reasoning)
        delta = self._behind.push(self._take_held())
        delta.reasoning = reasoning
        return delta

    def finish(self) -> MessageDelta:
        """What still waits."""
        if self._state is _State.INSIDE:
            return MessageDelta(reasoning=self._trim(self._held))
        delta, last = self._behind.push(self._take_held()), self._behind.finish()
        return MessageDelta(delta.content + last.content, calls=delta.calls + last.calls)

    def _open(self) -> None:
        """Look whether the answer begins with the opening tag, once that is certain."""
        text = self._held.lstrip()
        if text.startswith(self._opening):
            self._held = text.removeprefix(self._opening)
            self._state, self._is_behind_tag = _State.INSIDE, True
        elif not self._opening.startswith(text):
            self._state = _State.BEHIND

    def _read_reasoning(self) -> str:
        text, self._held, is_closed = split_at_tag(self._held, self._closing)
        reasoning = self._trim(text)
        if is_closed:
            self._state, self._is_behind_tag = _State.BEHIND, True
        return reasoning

    def _take_held(self) -> str:
        text, self._held = self._held, ""
        return self._trim(text)

    def _trim(self, text: str) -> str:
        if self._is_behind_tag:
            text = text.lstrip()
            self._is_behind_tag = not text
        return text
