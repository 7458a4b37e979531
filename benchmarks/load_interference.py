"""What loads do to requests that run meanwhile: ``python benchmarks/load_interference.py``.

A decode engine answers some requests without a pause. Now and then the KV of a long prompt arrives, from a producer
without a model in a process of its own; the request that it is for leaves when its load has begun, so it computes
nothing, and what is measured is the load alone. Stretches with and without arrivals take turns. ``--core 0`` pins the
decode engine, readers included, to one core: the hard case. Processor time is that of all the engine's threads: on one
core it is what a step takes when nothing else runs there, so its ratio is good on a busy machine too.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pdserve.bench.transfers.engine import Offered
from pdserve.bench.transfers.producer import ProducerProcess, ProducerStart
from pdserve.bench.transfers.surroundings import find_hindrance, surroundings
from pdserve.engine.config import build_config
from pdserve.engine.core import EngineCore
from pdserve.protocol import AddRequest, Role, SamplingParams

_ENOUGH_TOKENS = 6000
_PROMPT_TOKENS = 100
_NUM_WARMUP_STEPS = 10
_POLL_S = 0.002
_REDIS_BYTES = 4 << 30


@dataclass
class Stretches:
    """Steps of one kind, in milliseconds: times between two tokens of a running request, and processor times."""

    times: list[float] = field(default_factory=list)
    processor_times: list[float] = field(default_factory=list)

    def time(self, step: Callable[[], object]) -> None:
        """Run one step."""
        began, processor_began = time.perf_counter(), time.process_time()
        step()
        self.processor_times.append(1e3 * (time.process_time() - processor_began))
        self.times.append(1e3 * (time.perf_counter() - began))


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
    print(f"{arguments.running} running requests; times between their tokens in ms")
    print(
        "connector        arriving    quiet p50    p99   loading p50    p99   p99 ratio   of processor time   load p50"
    )
    for connector in arguments.connectors:
        hindrance = find_hindrance(connector)
        if hindrance is not None:
            print(f"{connector} is left out: {hindrance}")
            continue
        for num_tokens in arguments.prompt_tokens:
            print(render(connector, num_tokens, measure(connector, num_tokens, arguments)), flush=True)


def measure(connector: str, num_tokens: int, arguments: argparse.Namespace) -> Measured:
    """All rounds with one connector and one length; each round begins with the other kind of stretch."""
    measured = Measured()
    cores = os.sched_getaffinity(0)
    num_blocks = (arguments.arrivals + 1) * -(-num_tokens // 16)
    with contextlib.ExitStack() as stack:
        options = stack.enter_context(surroundings(connector, _REDIS_BYTES))
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
        producer = ProducerProcess(
            ProducerStart(connector, options, f"{engine_id}-prefill", core.identity, num_blocks, _POLL_S)
        )
        stack.callback(producer.close)
        with pinned(arguments.core):
            consumer = Consumer(core, arguments.running)
        for round_ in range(arguments.rounds):
            prompts = [consumer.make_prompt(num_tokens) for _ in range(arguments.arrivals)]
            offers = [producer.offer(prompt) for prompt in prompts]
            with pinned(arguments.core):
                for with_arrivals in (round_ % 2 == 0, round_ % 2 == 1):
                    if with_arrivals:
                        consumer.run_with_arrivals(arguments.steps, prompts, offers, measured)
                    else:
                        consumer.run_quietly(arguments.steps, measured)
    assert os.sched_getaffinity(0) == cores
    return measured


@contextlib.contextmanager
def pinned(core: int | None) -> Iterator[None]:
    """This thread, and those that it starts, run on ``core`` alone."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores if core is None else {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def render(connector: str, num_tokens: int, measured: Measured) -> str:
    """One line of the table."""
    kinds = (measured.quiet, measured.loading)
    quiet, loading = (statistics.quantiles(kind.times, n=100) for kind in kinds)
    quiet_processor, loading_processor = (statistics.quantiles(kind.processor_times, n=100) for kind in kinds)
    return (
        f"{connector:16} {num_tokens:8} {quiet[49]:12.1f} {quiet[98]:6.1f} {loading[49]:13.1f} {loading[98]:6.1f} "
        f"{loading[98] / quiet[98]:11.2f} {loading_processor[98] / quiet_processor[98]:19.2f} "
        f"{statistics.median(measured.loads):10.1f}"
    )


if __name__ == "__main__":
    main()
