"""Stop strings in a stream of text: found wherever the pieces are cut, and never shown by half.

The strings make one automaton (Aho and Corasick, "Efficient string matching", 1975): each character is one step,
and the state's depth is how much of the text's end may be a stop string's beginning and has to wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.errors import RequestError


@dataclass(slots=True)
class _State:
    """What the text's end matches: the longest beginning of a stop string."""

    depth: int
    next: dict[str, _State] = field(default_factory=dict)
    fallback: _State | None = None
    found: str | None = None
    """The longest stop string that ends here."""


class StopChecker:
    """Looks for the stop strings of one stream.

    The match that is complete first wins, the longest if several end at one character: the outcome does not depend
    on how the text is cut into pieces.

    Args:
        stop: the strings.
        include: whether the text keeps the stop string.

    Raises:
        RequestError: one of them is empty.
    """

    def __init__(self, stop: Sequence[str], include: bool = False) -> None:
        if not all(stop):
            raise RequestError("stop strings may not be empty", param="stop")
        self._include = include
        self._root = _build_automaton(stop)
        self._state = self._root
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """What may be shown after ``text``, and the stop string that ended the stream, if one did.

        Nothing may be pushed after a match; text behind it is dropped.
        """
        held = self._held + text
        state = self._state
        for index, character in enumerate(text, len(self._held) + 1):
            state = _step(state, character)
            if state.found is not None:
                self._held, self._state = "", self._root
                end = index if self._include else index - len(state.found)
                return held[:end], state.found
        self._state = state
        shown = len(held) - state.depth
        self._held = held[shown:]
        return held[:shown], None

    def flush(self) -> str:
        """The text that waited; called when the stream ends for another reason."""
        held, self._held, self._state = self._held, "", self._root
        return held


def _step(state: _State, character: str) -> _State:
    while True:
        following = state.next.get(character)
        if following is not None:
            return following
        if state.fallback is None:
            return state
        state = state.fallback


def _build_automaton(strings: Sequence[str]) -> _State:
    root = _State(0)
    for string in strings:
        state = root
        for character in string:
            state = state.next.setdefault(character, _State(state.depth + 1))
        state.found = string
    waiting = deque((child, root) for child in root.next.values())
    while waiting:
        # Breadth first: shallower states, which fallbacks lead to, are finished.
        state, fallback = waiting.popleft()
        state.fallback = fallback
        if state.found is None:
            state.found = fallback.found
        waiting.extend((child, _step(fallback, character)) for character, child in state.next.items())
    return root
