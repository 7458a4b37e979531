"""JSON read character by character, each one checked as it comes: the first that cannot be is an error at once.

A scan is a generator that is sent characters. It ends with a value's last character; only a number's end shows in the
character behind it, which the scan then returns.

Source: RFC 8259.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator

MAX_DEPTH = 64
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_NUMBER_CHARACTERS = frozenset("0123456789+-.eE")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_SPACE = frozenset(" \t\n\r")
_HEX = frozenset("0123456789abcdefABCDEF")

Scan = Generator[None, str, str | None]
ScanMember = Callable[[str, str, int], Scan]
"""Scans a member's value: gets its name as it stands between the quotes, the value's first character, the depth."""


class NotJsonError(Exception):
    """The character that came cannot stand there."""


def scan_space(first: str | None = None) -> Generator[None, str, str]:
    """Whitespace, beginning with ``first`` where that was read already; returns the first other character."""
    char = (yield) if first is None else first
    while char in _SPACE:
        char = yield
    return char


def scan_value(first: str, depth: int = 0) -> Scan:
    """Any value, of which ``first`` has come."""
    if first == '"':
        yield from scan_string()
    elif first == "{":
        yield from scan_object(depth)
    elif first == "[":
        yield from _scan_array(depth)
    elif first in _LITERALS:
        for expected in _LITERALS[first]:
            _check((yield) == expected)
    else:
        return (yield from _scan_number(first))
    return None


def scan_string() -> Generator[None, str, str]:
    """A string behind its opening quote; returns what stands between the quotes."""
    content: list[str] = []
    while (char := (yield)) != '"':
        _check(char >= " ")
        content.append(char)
        if char == "\\":
            escape = yield
            content.append(escape)
            _check(escape in '"\\/bfnrtu')
            for _ in range(4 if escape == "u" else 0):
                digit = yield
                content.append(digit)
                _check(digit in _HEX)
    return "".join(content)


def scan_object(depth: int = 0, scan_member: ScanMember | None = None) -> Scan:
    """An object behind its brace; ``scan_member`` scans the values of its own members."""
    _check(depth < MAX_DEPTH)
    char = yield from scan_space()
    while char != "}":
        _check(char == '"')
        name = yield from scan_string()
        _check((yield from scan_space()) == ":")
        first = yield from scan_space()
        value = scan_value(first, depth + 1) if scan_member is None else scan_member(name, first, depth + 1)
        char = yield from scan_space((yield from value))
        if char == ",":
            char = yield from scan_space()
            _check(char == '"')
        else:
            _check(char == "}")
    return None


def _scan_array(depth: int) -> Scan:
    _check(depth < MAX_DEPTH)
    char = yield from scan_space()
    while char != "]":
        char = yield from scan_space((yield from scan_value(char, depth + 1)))
        if char == ",":
            char = yield from scan_space()
            _check(char != "]")
        else:
            _check(char == "]")
    return None


def _scan_number(first: str) -> Scan:
    text, char = "", first
    while char in _NUMBER_CHARACTERS:
        text += char
        char = yield
    _check(_NUMBER.fullmatch(text) is not None)
    return char


def _check(is_valid: bool) -> None:
    if not is_valid:
        raise NotJsonError
