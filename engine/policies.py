"""The order of requests: who waits behind whom, and who is preempted first (the last)."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator

from pdserve.engine.request import Request


def get_fcfs_order(request: Request) -> tuple[int, int]:
    """First come, first served; a preempted request keeps its place."""
    return (0, request.arrival_order)


def get_priority_order(request: Request) -> tuple[int, int]:
    """Lower priority values first; first come among equals."""
    return (request.priority, request.arrival_order)


POLICIES: dict[str, Callable[[Request], tuple[int, int]]] = {
    "fcfs": get_fcfs_order,
    "priority": get_priority_order,
}


class RequestQueue:
    """Requests in a policy's order, each at most once.

    Args:
        policy: one of `POLICIES`.
    """

    def __init__(self, policy: str) -> None:
        self._order = POLICIES[policy]
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def __iter__(self) -> Iterator[Request]:
        """Those that are in it now, whatever is added or removed meanwhile."""
        return iter(self._requests.copy())

    def add(self, request: Request) -> None:
        """Put a request at its place; it is not in the queue."""
        bisect.insort(self._requests, request, key=self._order)

    def remove(self, request: Request) -> None:
        """Take a request out; nothing happens when it is not there."""
        index = bisect.bisect_left(self._requests, self._order(request), key=self._order)
        if index < len(self._requests) and self._requests[index] is request:
            del self._requests[index]

    def pop_last(self) -> Request:
        """Take out the last one."""
        return self._requests.pop()
