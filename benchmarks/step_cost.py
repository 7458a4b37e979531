"""What a decode step costs outside the kernels: ``taskset -c 0 python benchmarks/step_cost.py``.

Scheduling, inputs, sampling and the update of every request, on the real engine and model. All requests share one
prompt, so that filling the batch costs little; the decode steps are as those of different prompts. Times say how fast
this machine is; the counts (calls of Python and C functions, tensor operations) are the same on every one.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

from pdserve.bench.measure.offline import build_core
from pdserve.engine.config import build_config
from pdserve.engine.core import EngineCore
from pdserve.kernels import native_library
from pdserve.kernels.native_build import Variant
from pdserve.protocol import AddRequest, SamplingParams

_NUM_WARMUPS = 5


class TimedLibrary:
    """The kernels' library, with the time spent inside."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._library, name)

        def call(*arguments: object) -> object:
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - began

        setattr(self, name, call)
        return call


class OperationCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts tensor operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for each operation."""
        self.count += 1
        return func(*args, **(kwargs or {}))


def build_timed_core(max_num_seqs: int) -> tuple[EngineCore, TimedLibrary]:
    """An engine of the kind that serves, on one thread, whose time in the kernels is known."""
    load_library, libraries = native_library.load_library, []

    def load_timed(variant: Variant) -> TimedLibrary:
        libraries.append(TimedLibrary(load_library(variant)))
        return libraries[-1]

    config = build_config(max_num_seqs=max_num_seqs, kernel_backend="cpp", num_threads=1)
    with mock.patch("pdserve.kernels.cpp_backend.load_library", load_timed):
        core = build_core(config)
    (library,) = libraries
    return core, library


def fill_batch(core: EngineCore, batch: int, prompt_tokens: int, output_tokens: int) -> None:
    """Bring ``batch`` requests to their decode steps: one computes the prompt, the others find it."""
    prompt = [5 + index % 1000 for index in range(prompt_tokens)]
    sampling = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    for index in range(batch):
        core.add_request(AddRequest(request_id=f"{batch}-{index}", prompt_token_ids=prompt, sampling=sampling))
        if index == 0:
            core.step()
    while core.get_load().num_running < batch:
        core.step()


def count_calls(step: Callable[[], object]) -> int:
    """Calls of Python and C functions in one step."""
    count = 0

    def note(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def measure(core: EngineCore, library: TimedLibrary, batch: int, num_steps: int) -> str:
    """One row of the table."""
    fill_batch(core, batch, prompt_tokens=200, output_tokens=num_steps + 64)
    for _ in range(_NUM_WARMUPS):
        core.step()
    outside, inside = [], []
    for _ in range(num_steps):
        library.seconds, began = 0.0, time.perf_counter()
        core.step()
        inside.append(library.seconds)
        outside.append(time.perf_counter() - began - library.seconds)
    with OperationCounter() as operations:
        core.step()
    calls = count_calls(core.step)
    core.abort_requests([f"{batch}-{index}" for index in range(batch)])
    core.step()
    outside_ms, inside_ms = statistics.median(outside) * 1e3, statistics.median(inside) * 1e3
    least_ms = min(outside) * 1e3
    return f"| {batch} | {outside_ms:.2f} | {least_ms:.2f} | {inside_ms:.1f} | {calls} | {operations.count} |"


def main() -> None:
    """Print a row for each batch size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    core, library = build_timed_core(max(arguments.batches))
    print("| batch | outside kernels, ms (median) | (least) | kernels, ms | calls a step | tensor operations a step |")
    print("|---|---|---|---|---|---|", flush=True)
    for batch in arguments.batches:
        print(measure(core, library, batch, arguments.steps), flush=True)
    core.close()


if __name__ == "__main__":
    main()
