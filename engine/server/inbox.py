"""What other threads, and signal handlers, tell the engine's thread."""

from __future__ import annotations

import concurrent.futures
import enum
import queue
from dataclasses import dataclass

from pdserve.protocol import AddRequest


@dataclass(frozen=True, slots=True)
class Add:
    """A router's request, of the session with this number."""

    session: int
    request: AddRequest


@dataclass(frozen=True, slots=True)
class Compiled:
    """The grammar of a request that was added is compiled, or cannot be: the future is done."""

    request: AddRequest
    compiling: concurrent.futures.Future[None]


@dataclass(frozen=True, slots=True)
class Abort:
    """Requests that a router gave up, by its own ids."""

    session: int
    request_ids: list[str]


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """A router is gone: everything it asked for is to be aborted."""

    session: int


@dataclass(frozen=True, slots=True)
class Listen:
    """A router wants to hear how the prefix index changes."""

    session: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Take no new requests, finish the running ones, then end."""

    reason: str


class Page(enum.Enum):
    """Pages that the HTTP port serves from the engine's thread."""

    METRICS = enum.auto()
    BLOCKS = enum.auto()


@dataclass(frozen=True, slots=True)
class Scrape:
    """Somebody waits for a page about the engine, which only its own thread may read."""

    page: Page
    answer: concurrent.futures.Future[bytes]


@dataclass(frozen=True, slots=True)
class SocketFailed:
    """The socket thread ended by an unexpected error; nobody can be answered any more."""


Command = Add | Compiled | Abort | SessionClosed | Listen | Drain | Scrape | SocketFailed


class Inbox:
    """Commands for the engine's thread, oldest first.

    `put` and `wake` may be called on any thread and inside a signal handler; `take` on the engine's thread only.
    """

    def __init__(self) -> None:
        # Of the standard library's queues, the one whose put is reentrant: a signal handler may call it.
        self._queue: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._is_woken = False

    def __len__(self) -> int:
        return self._queue.qsize() - self._is_woken

    def put(self, command: Command) -> None:
        """Add a command; wakes `take`."""
        self._queue.put(command)

    def wake(self) -> None:
        """Wakes `take` with no command: there is news elsewhere. Many calls before it are like one."""
        if not self._is_woken:
            self._is_woken = True
            self._queue.put(None)

    def take(self, timeout_s: float | None) -> list[Command]:
        """All commands there are; waits for the first one, or for `wake`, up to ``timeout_s``, for ever if None."""
        commands: list[Command] = []
        try:
            command = self._queue.get(timeout=timeout_s) if timeout_s != 0 else self._queue.get_nowait()
            while True:
                if command is None:
                    self._is_woken = False  # what is new from now on may be missed by the caller's look
                else:
                    commands.append(command)
                command = self._queue.get_nowait()
        except queue.Empty:
            return commands
