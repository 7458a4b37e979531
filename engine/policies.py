"""The order of requests: who waits behind whom, and who is preempted first (the last)."""

from __future__ import annotations

from collections.abc import Callable

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
