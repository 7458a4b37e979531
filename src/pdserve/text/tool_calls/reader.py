"""Tells the tool calls in an answer's text from its content.

A call is one as soon as a function of the request is named and its arguments begin; from then on the arguments are
passed on as they come. What turns out not to be a call before that stays content, tag and all. A call that breaks off
later keeps the arguments that it had, and what follows is content.

Whitespace in front of a call and at the end behind one is neither.
"""

from __future__ import annotations

import enum
import string

from pdserve.text.message import CallDelta, MessageDelta, split_at_tag
from pdserve.text.tool_calls.call_scanner import CallScanner
from pdserve.text.tool_calls.formats import ToolCallFormat
from pdserve.text.tool_calls.json_scanner import NotJsonError


class _State(enum.Enum):
    CONTENT = enum.auto()
    OPEN = enum.auto()
    """Behind an opening tag, or where a call needs none."""
    CALL = enum.auto()
    CLOSING = enum.auto()
    """Behind a call, where its closing tag is due."""
    NEXT = enum.auto()
    """Behind a call, where another one may follow."""


class ToolCallReader:
    """Reads one answer.

    Args:
        form: how the model writes calls.
        names: of the functions that may be called.
    """

    def __init__(self, form: ToolCallFormat, names: frozenset[str]) -> None:
        self._form = form
        self._names = names
        self._between = form.between + string.whitespace
        self._state = _State.OPEN if form.may_be_bare else _State.CONTENT
        self._text = ""
        """Not looked at yet, or perhaps a tag's beginning."""
        self._unsure = ""
        """Read, and content unless a call begins with it."""
        self._space = ""
        """Whitespace behind the content so far."""
        self._scanner: CallScanner | None = None
        self._num_calls = 0
        self._delta = MessageDelta()
        self._steps = {
            _State.CONTENT: self._read_content,
            _State.OPEN: self._read_opening,
            _State.CALL: self._read_call,
            _State.CLOSING: self._read_closing,
            _State.NEXT: self._read_next,
        }

    def push(self, text: str) -> MessageDelta:
        """What the next piece adds."""
        self._text += text
        while self._steps[self._state]():
            pass
        return self._take_delta()

    def finish(self) -> MessageDelta:
        """What still waits."""
        if self._state is not _State.CLOSING:
            self._add_content(self._unsure + self._text)
        if not self._num_calls:
            self._delta.content += self._space
        return self._take_delta()

    # --- states: each says whether there is more to read ---------------------------------------------------

    def _read_content(self) -> bool:
        before, self._text, is_found = split_at_tag(self._text, self._form.opening)
        self._add_content(before)
        if is_found:
            self._state, self._unsure = _State.OPEN, self._form.opening
        return is_found

    def _read_opening(self) -> bool:
        self._unsure += self._skip_between()
        return self._read_brace()

    def _read_next(self) -> bool:
        """What stands between calls belongs to them."""
        self._skip_between()
        return self._read_brace()

    def _skip_between(self) -> str:
        behind = self._text.lstrip(self._between)
        skipped = self._text[: len(self._text) - len(behind)]
        self._text = behind
        return skipped

    def _read_brace(self) -> bool:
        if not self._text:
            return False
        if self._text[0] != "{":
            return self._give_up()
        self._unsure += "{"
        self._text = self._text[1:]
        self._state, self._scanner = _State.CALL, CallScanner(self._names)
        return True

    def _read_call(self) -> bool:
        scanner = self._scanner
        assert scanner is not None
        for index, char in enumerate(self._text):
            had_begun = scanner.has_begun
            try:
                scanner.push(char)
            except NotJsonError:
                self._text = self._text[index:]
                return self._break_off()
            if not scanner.has_begun:
                self._unsure += char
            elif not had_begun:
                self._begin_call()
            if scanner.is_done:
                self._text = self._text[index + 1 :]
                self._take_arguments()
                self._state = _State.CLOSING if self._form.closing else _State.NEXT
                return True
        self._text = ""
        self._take_arguments()
        return False

    def _read_closing(self) -> bool:
        """Behind a call; its closing tag may be missing."""
        text = self._text.lstrip()
        if text.startswith(self._form.closing):
            self._text = text.removeprefix(self._form.closing)
        elif self._form.closing.startswith(text):
            return False
        self._state = _State.CONTENT
        return True

    # --- turns ------------------------------------------------------------------------------------------

    def _give_up(self) -> bool:
        """What was read since the content is content too."""
        self._add_content(self._unsure)
        self._state, self._unsure = _State.CONTENT, ""
        return True

    def _break_off(self) -> bool:
        """The call's text goes on as no call does."""
        assert self._scanner is not None
        if not self._scanner.has_begun:
            return self._give_up()
        self._take_arguments()
        self._state = _State.CLOSING if self._form.closing else _State.CONTENT
        return True

    def _begin_call(self) -> None:
        assert self._scanner is not None
        self._delta.calls.append(CallDelta(self._num_calls, self._scanner.name, ""))
        self._num_calls += 1
        self._unsure = self._space = ""

    def _take_arguments(self) -> None:
        assert self._scanner is not None
        text = self._scanner.take_arguments() if self._scanner.has_begun else ""
        if text:
            self._delta.calls.append(CallDelta(self._num_calls - 1, None, text))

    def _add_content(self, text: str) -> None:
        """Content, without the whitespace at its end: a call may follow."""
        text = self._space + text
        shown = text.rstrip()
        self._delta.content += shown
        self._space = text[len(shown) :]

    def _take_delta(self) -> MessageDelta:
        delta, self._delta = self._delta, MessageDelta()
        return delta
