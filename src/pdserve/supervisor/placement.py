"""Which cores and how many compute threads each instance of a machine gets."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Placement:
    """The share of one machine.

    Attributes:
        num_threads: compute threads of each instance.
        cores: the cores of each instance in turn; None = wherever the system puts it.
    """

    num_threads: int
    cores: Sequence[Sequence[int] | None]


def share_cores(
    available: Sequence[int], num_instances: int, *, num_threads: int | None = None, pin: bool = True
) -> Placement:
    """Share cores out evenly.

    Instances are pinned only where each gets cores of its own: two busy ones on one core are better moved about
    by the system.

    Args:
        available: the cores there are.
        num_instances: instances to place.
        num_threads: threads of each instance; None = as many as its share has cores.
        pin: whether to pin at all.
    """
    threads = num_threads or max(1, len(available) // num_instances)
    if not pin or threads * num_instances > len(available):
        return Placement(threads, [None] * num_instances)
    return Placement(threads, [available[i * threads : (i + 1) * threads] for i in range(num_instances)])


def available_cores() -> list[int]:
    """Cores this process may use, in order; empty of meaning where the system cannot pin."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def can_pin() -> bool:
    """Whether this system can pin processes to cores."""
    return hasattr(os, "sched_setaffinity")
