"""A router over instances that only replay tokens, each process on the core that it is given.

Core 0 belongs to the router alone; instances and clients share the others. On a machine with one core all share it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(_TESTS), str(_TESTS / "e2e")]

from replay_service import Service as Service  # noqa: E402

ALL_CORES = frozenset(os.sched_getaffinity(0))
ROUTER_CORE = min(ALL_CORES)
OTHER_CORES = ALL_CORES - {ROUTER_CORE} or ALL_CORES
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@contextmanager
def on_cores(cores: frozenset[int]) -> Iterator[None]:
    """Processes started inside run on these cores."""
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, OTHER_CORES)


@contextmanager
def run_service(
    *, decode: Sequence[Sequence[str]] = ((),), router: Sequence[str] = (), is_listed: bool = True
) -> Iterator[Service]:
    """A router over decode instances, ready to serve.

    Args:
        decode: options of each instance.
        router: options of the router.
        is_listed: whether the router is told of the instances by its options.
    """
    with tempfile.TemporaryDirectory(prefix="pdserve-router-") as directory:
        service = Service(Path(directory))
        try:
            with on_cores(OTHER_CORES):
                for options in decode:
                    service.add("decode", *options)
            with on_cores(frozenset({ROUTER_CORE})):
                service.start("--slow-start-s", "0", *router, is_listed=is_listed)
            yield service.wait_for(0, len(decode) if is_listed else 0)
        finally:
            service.close()


@dataclass(frozen=True)
class ProcessState:
    """What a process uses.

    Attributes:
        cpu_s: processor time so far, of all its threads.
        rss_bytes: memory that is resident.
        num_fds: open file descriptors.
        num_threads: threads.
    """

    cpu_s: float
    rss_bytes: int
    num_fds: int
    num_threads: int


def read_process(pid: int) -> ProcessState:
    """The state of a process, from /proc."""
    directory = Path("/proc") / str(pid)
    fields = (directory / "stat").read_text().rpartition(")")[2].split()
    # Fields are numbered from 1 in proc(5); the rest of the line begins with the third.
    cpu_s = (int(fields[14 - 3]) + int(fields[15 - 3])) / _TICKS_PER_S
    rss_bytes = int(fields[24 - 3]) * os.sysconf("SC_PAGE_SIZE")
    return ProcessState(cpu_s, rss_bytes, len(list((directory / "fd").iterdir())), int(fields[20 - 3]))


def get_router_pid(service: Service) -> int:
    """The router's process."""
    assert service.router is not None
    return service.router.pid
