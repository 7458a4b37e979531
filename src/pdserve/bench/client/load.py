"""Runs a whole workload against one server: each request at its time, under a cap, with a progress bar."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import uvloop
from tqdm import tqdm

from pdserve.bench.client.client import BenchClient, now_since
from pdserve.bench.measure.samples import RequestSample
from pdserve.bench.workload.requests import BenchRequest


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to send, and when.

    Attributes:
        requests: in order of sending.
        due_times_s: of each, ascending.
        max_concurrency: requests under way at once; None = no limit.
        is_timed: whether latency counts from the due time; see `RequestSample.clock_s`.
        warmups: sent one by one beforehand, and not counted.
    """

    requests: Sequence[BenchRequest]
    due_times_s: Sequence[float]
    max_concurrency: int | None = None
    is_timed: bool = False
    warmups: Sequence[BenchRequest] = ()


def run_load(
    build_client: Callable[[], BenchClient], plan: LoadPlan, *, label: str, progress: bool
) -> list[RequestSample]:
    """Send everything and wait for it.

    Args:
        build_client: makes the client, on the event loop that it will live on.
        plan: what to send.
        label: stands before the progress bar.
        progress: whether there is one (on a terminal only).

    Returns:
        A sample for every request, in order, the lost ones too.
    """

    async def run() -> list[RequestSample]:
        async with build_client() as client:
            await _warm_up(client, plan.warmups)
            with tqdm(total=len(plan.requests), desc=label, unit="req", disable=None if progress else True) as bar:
                return await _Run(client, plan, bar).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


async def _warm_up(client: BenchClient, warmups: Sequence[BenchRequest]) -> None:
    """Failures of warm-ups are not told: what is wrong shows, counted, in the requests themselves."""
    for request in warmups:
        await client.send(request, RequestSample(0, 0.0, 0.0, 0.0), now_since(time.perf_counter()))


class _Run:
    """One run of a plan, on the event loop."""

    def __init__(self, client: BenchClient, plan: LoadPlan, bar: tqdm[None]) -> None:
        self._client = client
        self._plan = plan
        self._bar = bar
        self._num_lost = 0
        self._slots: contextlib.AbstractAsyncContextManager[None] = (
            asyncio.Semaphore(plan.max_concurrency) if plan.max_concurrency else contextlib.nullcontext()
        )
        self._clock = now_since(time.perf_counter())

    async def run(self) -> list[RequestSample]:
        """Send each request when it is due; samples in the order of the plan."""
        tasks = []
        async with asyncio.TaskGroup() as group:
            for index, due_s in enumerate(self._plan.due_times_s):
                # The loop's timer may wake up to a millisecond early.
                while (delay_s := due_s - self._clock()) > 0:
                    await asyncio.sleep(delay_s)
                tasks.append(group.create_task(self._send(index, due_s)))
        return [task.result() for task in tasks]

    async def _send(self, index: int, due_s: float) -> RequestSample:
        async with self._slots:
            sent_s = self._clock()
            sample = RequestSample(index, due_s, sent_s, clock_s=due_s if self._plan.is_timed else sent_s)
            await self._client.send(self._plan.requests[index], sample, self._clock)
        if sample.failure is not None:
            self._num_lost += 1
            self._bar.set_postfix_str(f"{self._num_lost} lost")
        self._bar.update(1)
        return sample
