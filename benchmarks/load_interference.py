"""What loads do to requests that run meanwhile: ``python benchmarks/load_interference.py``.

A decode engine answers some requests without a pause. Now and then the KV of a long prompt arrives, from a producer
without a model in a process of its own; the request that it is for leaves when its load has ended, so it computes
nothing, and what is measured is the load alone. ``--core 0`` pins the decode engine, readers included, to one core: the
hard case.

Stretches of three kinds take turns, the order changes from round to round: without arrivals, with them, and once more
without as a control, which shows what chance alone does to a ratio. A ratio is of p99s over the steps of all rounds;
its interval holds nine of ten of what rounds drawn with replacement give.

Where time goes is told by the system's own counts for the thread of the forward pass: what it computed, which grows
when others use the memory, and how long it could have run but had no core, because a reader or a server had it. Both
are good on a busy machine too. Processor time is that of all the engine's threads.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import random
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.bench.measure.summary import percentile
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
_IDLE_S = 0.001
_NUM_RESAMPLINGS = 500
_INTERVAL = (0.05, 0.95)
_HEADER = [
    "connector",
    "arriving",
    "token p50",
    "token p99",
    "p99 ratio",
    "control",
    "of processor time",
    "forward thread computes",
    "waits for a core",
    "load p50",
]


@dataclass
class Stretch:
    """Some steps one after the other, in milliseconds.

    Attributes:
        times: between two tokens of a running request.
        processor_times: of all the engine's threads.
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
    """Of all rounds; one stretch of each kind a round.

    Attributes:
        quiet: without arrivals.
        control: without arrivals too.
        loading: with.
        loads: milliseconds from each arrival until its KV was there.
    """

    quiet: list[Stretch] = field(default_factory=list)
    control: list[Stretch] = field(default_factory=list)
    loading: list[Stretch] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)


@dataclass
class Arrival:
    """A request whose KV is loaded.

    Attributes:
        request_id: the request.
        num_used_blocks: the engine's, when the request has its own.
        began: when it came.
    """

    request_id: str
    num_used_blocks: int
    began: float


class Consumer:
    """A decode engine with requests that run on and on.

    Args:
        core: the engine.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._numbers = random.Random(1)
        self._arrival: Arrival | None = None

    def begin(self, num_requests: int) -> None:
        """Let this many requests run."""
        for _ in range(num_requests):
            self._add(self.make_prompt(_PROMPT_TOKENS), _ENOUGH_TOKENS)
        while self._core.get_load().num_running < num_requests:
            self._core.step()
        for _ in range(_NUM_WARMUP_STEPS):
            self._core.step()

    def make_prompt(self, num_tokens: int) -> list[int]:
        """Tokens that nobody has seen."""
        return [self._numbers.randrange(self._core.limits.vocab_size) for _ in range(num_tokens)]

    def run_quietly(self, num_steps: int) -> Stretch:
        """Decode and nothing else."""
        stretch = Stretch()
        for _ in range(num_steps):
            stretch.time(self._core.step)
        return stretch

    def run_with_arrivals(
        self, num_steps: int, prompts: Sequence[list[int]], offers: Sequence[Offered], loads: list[float]
    ) -> Stretch:
        """Decode while prompts arrive, spread evenly over the steps, and are loaded one after the other.

        Args:
            num_steps: of the stretch; its last load may take a few more.
            prompts: that arrive.
            offers: where their KV is.
            loads: gets how long each load took, in milliseconds.
        """
        stretch = Stretch()
        due = list(zip(prompts, offers, strict=True))
        gap = num_steps // len(due)
        for step in range(num_steps):
            if due and self._arrival is None and step >= gap * (len(prompts) - len(due)):
                stretch.time(functools.partial(self._step_with, *due.pop(0)))
            else:
                stretch.time(self._core.step)
            self._look_at_arrival(loads)
        while self._arrival is not None:
            self._core.step()
            self._look_at_arrival(loads)
        return stretch

    def load(self, prompt: list[int], offered: Offered) -> None:
        """A request arrives and is loaded while nothing runs."""
        self._step_with(prompt, offered)
        self._look_at_arrival([])
        while self._arrival is not None:
            time.sleep(_IDLE_S)
            self._core.step()
            self._look_at_arrival([])

    def _step_with(self, prompt: list[int], offered: Offered) -> None:
        """A step before which a request arrives."""
        num_blocks = -(-len(prompt) // self._core.config.cache.block_size)
        num_used = self._core.get_load().num_used_blocks + num_blocks
        began = time.perf_counter()
        request_id = self._add(prompt, 8, kv_transfer_params=offered.params, output_token_ids=[1])
        self._arrival = Arrival(request_id, num_used, began)
        self._core.step()

    def _look_at_arrival(self, loads: list[float]) -> None:
        arrival = self._arrival
        if arrival is None or self._core.has_transfers():
            return
        if self._core.get_load().num_used_blocks >= arrival.num_used_blocks:
            loads.append(1e3 * (time.perf_counter() - arrival.began))
            self._core.abort_requests([arrival.request_id])
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
    parser.add_argument("--arrivals", type=int, default=3, help="in each stretch with some")
    parser.add_argument("--steps", type=int, default=40, help="of each stretch")
    parser.add_argument("--rounds", type=int, default=12, help="stretches of each kind")
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
    """All rounds with one connector and one length."""
    cores = os.sched_getaffinity(0)
    num_blocks = (arguments.arrivals + 1) * -(-num_tokens // 16)
    with contextlib.ExitStack() as stack:
        options = stack.enter_context(surroundings(connector, _STORE_BYTES))
        with pinned(arguments.core):
            config = build_config(
                model=arguments.model,
                connector=connector,
                connector_options=options,
                num_blocks=num_blocks + 250 * arguments.running,
                max_num_seqs=arguments.running + 1,
            )
            engine_id = f"bench-{os.getpid()}-{secrets.token_hex(4)}"
            core = EngineCore.build(config, role=Role.DECODE, engine_id=engine_id)
        stack.callback(core.close)
        producer = ProducerProcess(ProducerStart(connector, options, f"{engine_id}-prefill", core.identity, num_blocks))
        stack.callback(producer.close)
        consumer = Consumer(core)
        with pinned(arguments.core):
            num_loads = touch_memory(consumer, producer, num_tokens, core.limits.num_blocks)
            consumer.begin(arguments.running)
        measured = run_rounds(consumer, producer, num_tokens, arguments)
        check_loads(core, (num_loads + len(measured.loads)) * -(-num_tokens // 16))
    assert os.sched_getaffinity(0) == cores
    return measured


def touch_memory(consumer: Consumer, producer: ProducerProcess, num_tokens: int, num_blocks: int) -> int:
    """Load until every block of the pool has been written to; how many prompts that took.

    The system maps memory when it is first touched, which takes longer than to fill it.
    """
    num_loads = -(-num_blocks // -(-num_tokens // 16)) + 1
    for _ in range(num_loads):
        prompt = consumer.make_prompt(num_tokens)
        consumer.load(prompt, producer.offer(prompt, Chunks(num_tokens)))
    return num_loads


def run_rounds(
    consumer: Consumer, producer: ProducerProcess, num_tokens: int, arguments: argparse.Namespace
) -> Measured:
    """Stretches of all kinds, in an order that changes from round to round."""
    measured = Measured()
    orders = itertools.cycle(itertools.permutations((measured.quiet, measured.control, measured.loading)))
    for _ in range(arguments.rounds):
        prompts = [consumer.make_prompt(num_tokens) for _ in range(arguments.arrivals)]
        offers = [producer.offer(prompt, Chunks(num_tokens)) for prompt in prompts]
        with pinned(arguments.core):
            for kind in next(orders):
                if kind is measured.loading:
                    kind.append(consumer.run_with_arrivals(arguments.steps, prompts, offers, measured.loads))
                else:
                    kind.append(consumer.run_quietly(arguments.steps))
    return measured


def check_loads(core: EngineCore, num_blocks: int) -> None:
    """Every block that arrived was loaded.

    Raises:
        RuntimeError: some were not, and the figures are not of loads.
    """
    labels = {"connector": core.config.connector.connector, "direction": "load"}
    num_loaded = core.get_stats().registry.get_sample_value("pdserve_kv_transfer_blocks_total", labels)
    if num_loaded != num_blocks:
        raise RuntimeError(f"{num_loaded} of {num_blocks} blocks were loaded")


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
    times = [pool(kind, "times") for kind in kinds]
    processor_times = [pool(kind, "processor_times") for kind in kinds]
    return [
        *(" / ".join(f"{percentile(of_kind, share):.1f}" for of_kind in times) for share in (0.5, 0.99)),
        format_ratio(measured.loading, measured.quiet),
        format_ratio(measured.control, measured.quiet),
        f"{percentile(processor_times[1], 0.99) / percentile(processor_times[0], 0.99):.2f}",
        " / ".join(f"{statistics.fmean(pool(kind, 'computing')):.1f}" for kind in kinds),
        " / ".join(f"{statistics.fmean(pool(kind, 'waiting')):.2f}" for kind in kinds),
        f"{statistics.median(measured.loads):.1f}",
    ]


def pool(stretches: Iterable[Stretch], what: str) -> list[float]:
    """One figure of all steps of some stretches, ascending."""
    return sorted(itertools.chain.from_iterable(getattr(stretch, what) for stretch in stretches))


def format_ratio(stretches: Sequence[Stretch], quiet: Sequence[Stretch]) -> str:
    """The p99 of one kind of stretch over that of the other, with its interval."""
    numbers = random.Random(1)
    rounds = list(zip(stretches, quiet, strict=True))
    ratios = sorted(compare_p99(numbers.choices(rounds, k=len(rounds))) for _ in range(_NUM_RESAMPLINGS))
    low, high = (percentile(ratios, share) for share in _INTERVAL)
    return f"{compare_p99(rounds):.2f} ({low:.2f}-{high:.2f})"


def compare_p99(rounds: Sequence[tuple[Stretch, Stretch]]) -> float:
    """The p99 of the rounds' first stretches over that of their second."""
    first, second = (percentile(pool(kind, "times"), 0.99) for kind in zip(*rounds, strict=True))
    return first / second


if __name__ == "__main__":
    main()
