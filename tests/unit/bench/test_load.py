from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pdserve.bench.client.client import BenchClient
from pdserve.bench.client.load import LoadPlan, run_load
from pdserve.bench.client.settings import TargetSettings
from pdserve.bench.measure.samples import Failure, RequestSample
from pdserve.bench.workload.requests import BenchRequest


class FakeClient(BenchClient):
    """Answers after a while without any network; keeps who was under way together."""

    def __init__(self, delay_s: float = 0.0) -> None:
        super().__init__("http://s", "m", TargetSettings())
        self.delay_s = delay_s
        self.num_live = self.max_live = 0
        self.order: list[int] = []
        self.prompts: list[str | None] = []

    async def send(self, request: BenchRequest, sample: RequestSample, clock: Callable[[], float]) -> None:
        self.num_live += 1
        self.max_live = max(self.max_live, self.num_live)
        self.order.append(sample.index)
        self.prompts.append(request.prompt)
        await asyncio.sleep(self.delay_s)
        sample.event_times_s = [clock()]
        sample.end_s = clock()
        if request.prompt == "lost":
            sample.failure = Failure("kind", "message")
        self.num_live -= 1


def requests(count: int) -> list[BenchRequest]:
    return [BenchRequest(1, f"p{i}") for i in range(count)]


def test_the_cap_holds_and_is_used_in_order() -> None:
    client = FakeClient(0.002)
    plan = LoadPlan(requests(10), [0.0] * 10, max_concurrency=3)
    samples = run_load(lambda: client, plan, label="t", progress=False)
    assert client.max_live == 3
    assert client.order == [sample.index for sample in samples] == list(range(10))
    assert all(sample.clock_s == sample.sent_s for sample in samples)


def test_without_a_cap_all_are_under_way() -> None:
    client = FakeClient(0.002)
    run_load(lambda: client, LoadPlan(requests(10), [0.0] * 10), label="t", progress=False)
    assert client.max_live == 10


def test_nothing_is_sent_before_it_is_due_and_waiting_counts() -> None:
    client = FakeClient(0.03)
    plan = LoadPlan(requests(3), [0.0, 0.01, 0.02], max_concurrency=1, is_timed=True)
    samples = run_load(lambda: client, plan, label="t", progress=False)
    assert all(sample.sent_s >= sample.due_s == sample.clock_s for sample in samples)
    assert samples[2].sent_s >= samples[1].end_s >= 0.06 - 2e-3  # two waits, each up to a millisecond short
    assert samples[2].ttft_s >= samples[2].end_s - 0.02 - 1e-3


def test_warmups_go_first_one_by_one_and_are_not_counted() -> None:
    client = FakeClient(0.001)
    warmups = [BenchRequest(1, "w0"), BenchRequest(1, "lost")]
    plan = LoadPlan(requests(2), [0.0, 0.0], warmups=warmups)
    samples = run_load(lambda: client, plan, label="t", progress=False)
    assert client.prompts[:2] == ["w0", "lost"]
    assert sorted(client.prompts[2:], key=str) == ["p0", "p1"]
    assert [sample.failure for sample in samples] == [None, None]


def test_the_bar_stays_off_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    run_load(FakeClient, LoadPlan(requests(2), [0.0, 0.0]), label="t", progress=True)
    assert capsys.readouterr().err == ""
