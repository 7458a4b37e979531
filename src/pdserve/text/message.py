"""What an answer's text is made of: content, reasoning and tool calls, told apart as the text comes.

However the text is cut into pieces, what the pieces give, put together, is the same; so a streamed answer equals the
whole one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class CallDelta:
    """A part of a tool call.

    Attributes:
        index: of the call in its message, from 0.
        name: of the function, on the call's first part.
        arguments: the next piece of its JSON text, as the model wrote it.
    """

    index: int
    name: str | None
    arguments: str


@dataclass(slots=True)
class MessageDelta:
    """What a piece of text added to a message."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class MessageReader(Protocol):
    """Reads one answer's text. Use once."""

    def push(self, text: str) -> MessageDelta:
        """What the next piece adds; text that may turn out to be something else waits."""
        ...

    def finish(self) -> MessageDelta:
        """What still waits at the answer's end; called once."""
        ...


class ContentReader:
    """All text is content."""

    def push(self, text: str) -> MessageDelta:
        """The text."""
        return MessageDelta(text)

    def finish(self) -> MessageDelta:
        """Nothing waits."""
        return MessageDelta()


def split_at_tag(text: str, tag: str) -> tuple[str, str, bool]:
    """Text in front of a tag and behind it; without one, what cannot be part of it and what may be its beginning."""
    before, found, behind = text.partition(tag)
    if found:
        return before, behind, True
    held = next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)
    return text[: len(text) - held], text[len(text) - held :], False
