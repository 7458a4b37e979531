"""One tool call, ``{"name": …, "arguments": {…}}``, read character by character."""

from __future__ import annotations

import json

from pdserve.text.tool_calls.json_scanner import NotJsonError, Scan, scan_object, scan_string, scan_value

_ARGUMENTS = ("arguments", "parameters")


class CallScanner:
    """Reads the call behind its opening brace. Members may stand in any order; others than these two are ignored.

    Args:
        names: of the functions that may be called; another name is no call.

    Attributes:
        name: of the function, once it is known.
        has_begun: name and the arguments' beginning are known: this is a call.
        is_done: it is whole.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.name: str | None = None
        self.has_begun = False
        self.is_done = False
        self._names = names
        self._arguments: list[str] = []
        self._has_arguments = False
        self._scan = scan_object(scan_member=self._scan_member)
        next(self._scan)

    def push(self, char: str) -> None:
        """The next character; none may come once the call is done.

        Raises:
            NotJsonError: this is no call.
        """
        try:
            self._scan.send(char)
        except StopIteration:
            self.is_done = True
            if self.name is None:
                raise NotJsonError from None
            if not self._has_arguments:
                self._arguments.append("{}")
        self.has_begun = self.name is not None and (self._has_arguments or self.is_done)

    def take_arguments(self) -> str:
        """The arguments' text since the last time."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text

    def _scan_member(self, name: str, first: str, depth: int) -> Scan:
        if name == "name":
            return self._scan_name(first)
        if name in _ARGUMENTS:
            return self._scan_arguments(first, depth)
        return scan_value(first, depth)

    def _scan_name(self, first: str) -> Scan:
        if first != '"' or self.name is not None:
            raise NotJsonError
        name = json.loads(f'"{(yield from scan_string())}"')
        if name not in self._names:
            raise NotJsonError
        self.name = name
        return None

    def _scan_arguments(self, first: str, depth: int) -> Scan:
        if first != "{" or self._has_arguments:
            raise NotJsonError
        self._has_arguments = True
        self._arguments.append(first)
        scan = scan_object(depth)
        next(scan)
        while True:
            char = yield
            try:
                scan.send(char)
            except StopIteration:
                self._arguments.append(char)
                return None
            self._arguments.append(char)
