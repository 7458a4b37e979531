"""How much of a save hides behind the forward pass: ``python benchmarks/save_overlap.py``.

One prefill engine saves whole blocks, another layer by layer, both to files on /dev/shm, in turn. *Visible* is the time
from the end of the prompt's last forward pass until the hand-off is announced: what the consumer waits for.
``taskset -c 0`` before it shows an engine whose writer has no core of its own.
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.connectors.base import ConnectorContext
from pdserve.connectors.shared_storage import SharedStorageConnector
from pdserve.engine.config import build_config
from pdserve.engine.core import EngineCore
from pdserve.protocol import AddRequest, FinishReason, Role, SamplingParams

_POLL_S = 0.0001
_NUM_WARMUPS = 2


class TimedStorage(SharedStorageConnector):
    """Shared storage that notes when forward passes end, in the list that option ``forward_ends`` is."""

    @classmethod
    def build_scheduler(cls, context: ConnectorContext) -> Any:
        """The scheduler half."""
        return super().build_scheduler(_without_list(context)[0])

    @classmethod
    def build_worker(cls, context: ConnectorContext) -> Any:
        """The worker half, listening."""
        plain, forward_ends = _without_list(context)
        worker = super().build_worker(plain)
        wait_for_save = worker.wait_for_save

        def note_end() -> None:
            forward_ends.append(time.perf_counter())
            wait_for_save()

        worker.wait_for_save = note_end  # type: ignore[method-assign]
        return worker


def _without_list(context: ConnectorContext) -> tuple[ConnectorContext, list[float]]:
    options = dict(context.options)
    forward_ends = options.pop("forward_ends")
    return ConnectorContext(context.engine_id, context.role, context.identity, context.spec, options), forward_ends


@dataclass(frozen=True)
class HandOff:
    """One prompt's times in milliseconds.

    Attributes:
        prefill: from the request to the end of its last forward pass.
        visible: from there until the hand-off is announced.
    """

    prefill: float
    visible: float


class Producer:
    """A prefill engine that saves one way.

    Args:
        model: as after ``--model``.
        directory: where files go.
        chunk: token budget of a step.
        layerwise: the way.
    """

    def __init__(self, model: str, directory: Path, chunk: int, *, layerwise: bool) -> None:
        self.forward_ends: list[float] = []
        options = {"path": str(directory), "layerwise": layerwise, "forward_ends": self.forward_ends}
        config = build_config(
            model=model,
            connector="__main__:TimedStorage",
            connector_options=options,
            max_num_batched_tokens=chunk,
            num_blocks=512,
            enable_prefix_caching=False,
        )
        self.core = EngineCore.build(config, role=Role.PREFILL, engine_id=f"bench-{os.getpid()}-{layerwise}")

    def hand_over(self, prompt: list[int]) -> HandOff:
        """Compute a prompt and wait until its KV can be fetched."""
        began = time.perf_counter()
        request_id = secrets.token_hex(4)
        sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        self.core.add_request(
            AddRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling, handoff=True)
        )
        forward_end = began
        while True:
            for output in self.core.step():
                if output.new_token_ids:
                    forward_end = self.forward_ends[-1]
                if output.finish_reason is FinishReason.HANDOFF:
                    visible = time.perf_counter() - forward_end
                    return HandOff(1e3 * (forward_end - began), 1e3 * visible)
                if output.finish_reason is not None:
                    raise SystemExit(f"the prompt was not handed over: {output.finish_reason.value}")
            if not self.core.has_work():
                time.sleep(_POLL_S)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[512, 2000])
    parser.add_argument("--chunk", type=int, default=512, help="token budget of one step")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="save-overlap-", dir="/dev/shm"))
    try:
        producers = [
            Producer(arguments.model, directory, arguments.chunk, layerwise=layerwise) for layerwise in (False, True)
        ]
        print(f"{len(os.sched_getaffinity(0))} cores, chunks of {arguments.chunk} tokens, medians in ms")
        print("prompt        prefill whole  layerwise   ratio     visible whole  layerwise  hidden  at best")
        for num_tokens in arguments.prompt_tokens:
            runs = measure(producers, num_tokens, arguments.repeats)
            print(render(num_tokens, runs), flush=True)
        for producer in producers:
            producer.core.close()
    finally:
        shutil.rmtree(directory)


def render(num_tokens: int, runs: Sequence[Sequence[HandOff]]) -> str:
    """One line of the table; at best = of the quickest runs, which other processes disturb least."""
    prefill = [[hand_off.prefill for hand_off in way] for way in runs]
    visible = [[hand_off.visible for hand_off in way] for way in runs]
    ratio = statistics.median(b / a for a, b in zip(*prefill, strict=True))
    (prefill_whole, prefill_layers), (whole, layers) = (map(statistics.median, ways) for ways in (prefill, visible))
    return (
        f"{num_tokens:6} tokens {prefill_whole:13.1f} {prefill_layers:10.1f} {ratio:7.3f} "
        f"{whole:17.2f} {layers:10.2f} {1 - layers / whole:7.0%} {1 - min(visible[1]) / min(visible[0]):8.0%}"
    )


def measure(producers: list[Producer], num_tokens: int, repeats: int) -> list[list[HandOff]]:
    """Hand prompts of random tokens over, each producer in turn, beginning with another one each time."""
    numbers = random.Random(num_tokens)
    runs: list[list[HandOff]] = [[] for _ in producers]
    vocab_size = producers[0].core.limits.vocab_size
    for repeat in range(_NUM_WARMUPS + repeats):
        for index in (0, 1) if repeat % 2 else (1, 0):
            hand_off = producers[index].hand_over([numbers.randrange(vocab_size) for _ in range(num_tokens)])
            if repeat >= _NUM_WARMUPS:
                runs[index].append(hand_off)
    return runs


if __name__ == "__main__":
    main()
