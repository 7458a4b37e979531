"""What a command shows: lines, from any thread, and one text that grows between them."""

from __future__ import annotations

import contextlib
import threading
from typing import TextIO


class Screen:
    """A line never goes on where the growing text stands. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_line_open = False

    def say(self, line: str, file: TextIO | None = None) -> None:
        """Print a line; a reader that went away (a closed pipe or terminal) does not end the service."""
        with self._lock, contextlib.suppress(OSError):
            if self._is_line_open:
                self._is_line_open = False
                print(flush=True)
            print(line, file=file, flush=True)

    def write(self, text: str) -> None:
        """Go on with the growing text.

        Raises:
            OSError: nobody reads any more.
        """
        with self._lock:
            if text:
                print(text, end="", flush=True)
                self._is_line_open = not text.endswith("\n")
