"""What loads do to requests that run meanwhile: ``python benchmarks/load_interference.py``.

A decode engine answers some requests without a pause. Now and then the KV of a long prompt arrives, from a producer
without a model in a process of its own; the request that it is for leaves when its load has begun, so it computes
nothing, and what is measured is the load alone. Stretches with and without arrivals take turns. ``--core 0`` pins the
decode engine, readers included, to one core: the hard case.

Where time goes is told by the system's own counts for the thread of the forward pass: what it computed, which grows
when others use the memory, and how long it could have run but had no core, because a reader or a server had it. Both
are good on a busy machine too. Processor time is that of all the engine's threads.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.bench.show.tables import format_table
from pdserve.bench.transfers.engine import Chunks, Offered
from pdserve.bench.transfers.producer import ProducerProcess, ProducerStart
from pdserve.bench.transfers.surroundings import find_hindrance, surroundings
from pdserve.engine.config import build_config
from pdserve.engine.core import EngineCore
from pdserve.protocol import AddRequest, Role, SamplingParams

_ENOUGH_TOKENS = 6000
_PROMPT_TOKENS = 100
_NUM_WARMUP_STEPS = 10
_STORE_BYTES = 4 << 30
_HEADER = [
    "connector",
    "arriving",
    "token p50",
    "token p99",
    "p99 ratio",
    "of processor time",
    "forward thread computes",
    "waits for a core",
    "load p50",
]


@dataclass
class Stretches:
    """Steps of one kind, in milliseconds.

    Attributes:
        times: between two tokens of a running request.
        processor_times: of all threads.
        computing: the forward pass's thread had a core.
        waiting: it could have used one and had none.
    """

    times: list[float] = field(default_factory=list)
    processor_times: list[float] = field(default_factory=list)
    computing: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)

    def time(self, step: Callable[[], object]) -> None:
        """Run one step."""
        computing, waiting = read_scheduler_times()
        began, processor_began = time.perf_counter(), time.process_time()
        step()
        self.processor_times.append(1e3 * (time.process_time() - processor_began))
        self.times.append(1e3 * (time.perf_counter() - began))
        ended = read_scheduler_times()
        self.computing.append(ended[0] - computing)
        self.waiting.append(ended[1] - waiting)


@dataclass
class Measured:
    """Of all stretches.

    Attributes:
        quiet: those without arrivals.
        loading: those with.
        loads: milliseconds from each arrival until its KV was there.
    """

    quiet: Stretches = field(default_factory=Stretches)
    loading: Stretches = field(default_factory=Stretches)
    loads: list[float] = field(default_factory=list)


@dataclass
class Arrival:
    """A request whose KV is loaded; it leaves when ``num_used_blocks`` shows that it has its own."""

    request_id: str
    num_used_blocks: int
    began: float
    is_loading: bool = False


class Consumer:
    """A decode engine with requests that run on and on.

    Args:
        core: the engine.
        num_requests: that run.
    """

    def __init__(self, core: EngineCore, num_requests: int) -> None:
        self._core = core
        self._numbers = random.Random(1)
        self._arrival: Arrival | None = None
        for _ in range(num_requests):
            self._add(self.make_prompt(_PROMPT_TOKENS), _ENOUGH_TOKENS)
        while core.get_load().num_running < num_requests:
            core.step()
        for _ in range(_NUM_WARMUP_STEPS):
            core.step()

    def make_prompt(self, num_tokens: int) -> list[int]:
        """Tokens that nobody has seen."""
        return [self._numbers.randrange(self._core.limits.vocab_size) for _ in range(num_tokens)]

    def run_quietly(self, num_steps: int, measured: Measured) -> None:
        """Decode and nothing else."""
        for _ in range(num_steps):
            measured.quiet.time(self._core.step)

    def run_with_arrivals(
        self, num_steps: int, prompts: Sequence[list[int]], offers: Sequence[Offered], measured: Measured
    ) -> None:
        """Decode while prompts arrive, spread evenly over the steps, and are loaded one after the other."""
        due = list(zip(prompts, offers, strict=True))
        gap = num_steps // len(due)
        for step in range(num_steps):
            if due and self._arrival is None and step >= gap * (len(prompts) - len(due)):
                self._arrive(*due.pop(0))
            measured.loading.time(self._core.step)
            self._look_at_arrival(measured)
        while self._arrival is not None:
            self._core.step()
            self._look_at_arrival(measured)

    def _arrive(self, prompt: list[int], offered: Offered) -> None:
        num_blocks = -(-len(prompt) // self._core.config.cache.block_size)
        num_used = self._core.get_load().num_used_blocks + num_blocks
        request_id = self._add(prompt, 8, kv_transfer_params=offered.params, output_token_ids=[1])
        self._arrival = Arrival(request_id, num_used, time.perf_counter())

    def _look_at_arrival(self, measured: Measured) -> None:
        arrival = self._arrival
        if arrival is None:
            return
        if self._core.get_load().num_used_blocks >= arrival.num_used_blocks:
            if not arrival.is_loading:
                arrival.is_loading = True
                self._core.abort_requests([arrival.request_id])
        elif arrival.is_loading:
            measured.loads.append(1e3 * (time.perf_counter() - arrival.began))
            self._arrival = None

    def _add(self, prompt: list[int], max_tokens: int, **parts: Any) -> str:
        request_id = secrets.token_hex(6)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._core.add_request(AddRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling, **parts))
        return request_id


def main() -> None:
    """Measure each connector and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connectors", nargs="+", default=["shared_storage", "redis", "nixl"])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--running", type=int, default=8, help="requests that run")
    parser.add_argument(
        "--prompt-tokens", type=int, nargs="+", default=[1000, 4000], help="of the requests that arrive"
    )
    parser.add_argument("--arrivals", type=int, default=6, help="in each stretch")
    parser.add_argument("--steps", type=int, default=90, help="of each stretch")
    parser.add_argument("--rounds", type=int, default=4, help="stretches of each kind")
    parser.add_argument("--core", type=int, help="pin the decode engine to this core")
    arguments = parser.parse_args()
    rows = [_HEADER]
    for connector in arguments.connectors:
        hindrance = find_hindrance(connector)
        if hindrance is not None:
            print(f"{connector} is left out: {hindrance}")
            continue
        for num_tokens in arguments.prompt_tokens:
            rows.append([connector, str(num_tokens), *describe(measure(connector, num_tokens, arguments))])
    print(f"{arguments.running} running requests; ms; a / b: without arrivals / with arrivals\n\n{format_table(rows)}")


def measure(connector: str, num_tokens: int, arguments: argparse.Namespace) -> Measured:
    """All rounds with one connector and one length; each round begins with the other kind of stretch."""
    measured = Measured()
    cores = os.sched_getaffinity(0)
    num_blocks = (arguments.arrivals + 1) * -(-num_tokens // 16)
    with contextlib.ExitStack() as stack:
        options = stack.enter_context(surroundings(connector, _STORE_BYTES))
        with pinned(arguments.core):
            config = build_config(
                model=arguments.model,
                connector=connector,
                connector_options=options,
                num_blocks=num_blocks + 200 * arguments.running,
                max_num_seqs=arguments.running + 1,
            )
            engine_id = f"bench-{os.getpid()}-{secrets.token_hex(4)}"
            core = EngineCore.build(config, role=Role.DECODE, engine_id=engine_id)
        stack.callback(core.close)
        producer = ProducerProcess(ProducerStart(connector, options, f"{engine_id}-prefill", core.identity, num_blocks))
        stack.callback(producer.close)
        with pinned(arguments.core):
            consumer = Consumer(core, arguments.running)
        for round_ in range(arguments.rounds):
            prompts = [consumer.make_prompt(num_tokens) for _ in range(arguments.arrivals)]
            offers = [producer.offer(prompt, Chunks(num_tokens)) for prompt in prompts]
            with pinned(arguments.core):
                for with_arrivals in (round_ % 2 == 0, round_ % 2 == 1):
                    if with_arrivals:
                        consumer.run_with_arrivals(arguments.steps, prompts, offers, measured)
                    else:
                        consumer.run_quietly(arguments.steps, measured)
    assert os.sched_getaffinity(0) == cores
    return measured


def read_scheduler_times() -> tuple[float, float]:
    """Milliseconds that this thread has had a core, and that it has waited for one, since it began (Linux)."""
    fields = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()
    return int(fields[0]) / 1e6, int(fields[1]) / 1e6


@contextlib.contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """This thread, and those that it starts, run on ``core`` alone."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores if core is None else {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def describe(measured: Measured) -> list[str]:
    """The cells behind the arriving tokens."""
    kinds = (measured.quiet, measured.loading)
    quiet, loading = (statistics.quantiles(kind.times, n=100) for kind in kinds)
    quiet_processor, loading_processor = (statistics.quantiles(kind.processor_times, n=100) for kind in kinds)
    return [
        f"{quiet[49]:.1f} / {loading[49]:.1f}",
        f"{quiet[98]:.1f} / {loading[98]:.1f}",
        f"{loading[98] / quiet[98]:.2f}",
        f"{loading_processor[98] / quiet_processor[98]:.2f}",
        " / ".join(f"{statistics.fmean(kind.computing):.1f}" for kind in kinds),
        " / ".join(f"{statistics.fmean(kind.waiting):.2f}" for kind in kinds),
        f"{statistics.median(measured.loads):.1f}",
    ]


if __name__ == "__main__":
    main()
