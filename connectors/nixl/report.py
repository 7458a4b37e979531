"""What ended, between the transfer thread that brings it about and the forward thread that asks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from pdserve.connectors.base import ConnectorOutput


class TransferReport:
    """Collects ends and counters until they are asked for. Thread-safe.

    A sending is reported when it has ended and the engine has announced that it wants to hear of it, whichever
    comes last; once.

    Attributes:
        wake: called after each end, on the thread that tells of it; it returns at once.
    """

    def __init__(self) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._output = ConnectorOutput()
        self._loading: set[str] = set()
        self._sending: set[str] = set()
        self._due: set[str] = set()
        self._sent: dict[str, tuple[bool, int]] = {}

    def start_sending(self, request_id: str) -> None:
        """The request's blocks are held; its end will be told."""
        with self._lock:
            self._sending.add(request_id)

    def end_sending(self, request_id: str, *, ok: bool, num_bytes: int) -> None:
        """The request's blocks are free; ``num_bytes`` of them were fetched."""
        with self._lock:
            self._sent[request_id] = (ok, num_bytes)
        self.wake()

    def start_load(self, request_id: str) -> bool:
        """A load begins; False, and counted, when the request has one whose end was not told yet."""
        with self._lock:
            if request_id in self._loading:
                self._output.stats.count_failure("duplicate")
                return False
            self._loading.add(request_id)
            return True

    def end_load(
        self, request_id: str, *, num_good_tokens: int | None, num_blocks: int, num_bytes: int, seconds: float
    ) -> None:
        """A load ended.

        Args:
            request_id: whose.
            num_good_tokens: from its start; None = all.
            num_blocks: verified.
            num_bytes: of them.
            seconds: that the load took.
        """
        with self._lock:
            output = self._output
            output.received_bytes[request_id] = num_bytes
            output.stats.num_blocks_loaded += num_blocks
            output.stats.num_bytes_loaded += num_bytes
            output.stats.load_seconds += seconds
            if num_good_tokens is None:
                output.finished_receiving.add(request_id)
            else:
                output.failed_receiving[request_id] = num_good_tokens
        self.wake()

    def count_saved(self, num_blocks: int, num_bytes: int) -> None:
        """A consumer fetched blocks."""
        with self._lock:
            self._output.stats.num_blocks_saved += num_blocks
            self._output.stats.num_bytes_saved += num_bytes

    def count_save_time(self, seconds: float) -> None:
        """Time that this side spent on handing blocks out: consumers read them by themselves."""
        with self._lock:
            self._output.stats.save_seconds += seconds

    def count_failure(self, kind: str) -> None:
        """Something failed."""
        with self._lock:
            self._output.stats.count_failure(kind)

    def tell_scheduler(self, message: Any) -> None:
        """Send a message to the scheduler half."""
        with self._lock:
            self._output.messages.append(message)

    def take(self, finished_request_ids: Sequence[str]) -> ConnectorOutput:
        """What ended since the last call.

        Args:
            finished_request_ids: requests whose sending is to be reported from now on. One that is unknown or was
                given before is refused and counted.
        """
        with self._lock:
            for request_id in finished_request_ids:
                if request_id in self._sending and request_id not in self._due:
                    self._due.add(request_id)
                else:
                    self._output.stats.count_failure("unknown")
            output, self._output = self._output, ConnectorOutput()
            self._loading.difference_update(output.finished_receiving, output.failed_receiving)
            for request_id in self._due & self._sent.keys():
                ok, num_bytes = self._sent.pop(request_id)
                self._due.discard(request_id)
                self._sending.discard(request_id)
                output.finished_sending.add(request_id)
                output.sent_bytes[request_id] = num_bytes
                if not ok:
                    output.failed_sending.add(request_id)
            return output
