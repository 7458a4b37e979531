"""R19: what engines leave behind that were closed."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from pdserve.connectors.testing.bench import Bench
from pdserve.connectors.testing.check import check, collect_checks

_OPEN_FILES = Path("/proc/self/fd")
_NUM_RESTARTS = 3


@check("R19", needs=())
def a_closed_engine_leaves_nothing(bench: Bench) -> None:
    """Engines that came, exchanged KV and went leave no thread and no open file, however many there were."""
    _come_and_go(bench)  # what a process keeps for all engines is there from now on
    bench.pass_steps()
    before = _list_resources()
    for _ in range(_NUM_RESTARTS):
        _come_and_go(bench)
    deadline = time.monotonic() + bench.patience.timeout_s
    while (left := _tell_growth(before)) and time.monotonic() < deadline:
        bench.pass_steps()
    bench.require(not left, f"{_NUM_RESTARTS} pairs of engines were closed, and leave {left}")


def _come_and_go(bench: Bench) -> None:
    producer, consumer = bench.build_producer(), bench.build_consumer()
    prompt = bench.make_prompt(2 * bench.block_size + 1)
    bench.fetch(consumer, prompt, bench.hand_over(producer, prompt))
    bench.stop(consumer)
    bench.stop(producer)


def _tell_growth(before: Mapping[str, set[str]]) -> str:
    """What there is more of, by one for each pair at least; empty when there is nothing."""
    gc.collect()
    grown = []
    for what, names in _list_resources().items():
        if len(names) >= len(before[what]) + _NUM_RESTARTS:
            grown.append(f"{what}: {', '.join(sorted(names - before[what]))}")
    return "; ".join(grown)


def _list_resources() -> Mapping[str, set[str]]:
    threads = {f"{thread.name} ({thread.ident})" for thread in threading.enumerate()}
    return {"threads": threads, "open files": set(_list_open_files())}


def _list_open_files() -> Iterator[str]:
    for path in _OPEN_FILES.iterdir() if _OPEN_FILES.is_dir() else ():
        with contextlib.suppress(OSError):  # that of the listing itself is closed by now
            yield f"{path.name} ({path.readlink()})"


CHECKS = collect_checks(globals())
