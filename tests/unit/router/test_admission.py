from __future__ import annotations

import asyncio

import pytest
from fake_instances import run

from pdserve.errors import OverloadedError, RequestTimeoutError
from pdserve.router.admission import Admission, Visitor
from pdserve.router.config import AdmissionSettings
from pdserve.router.metrics import RouterMetrics


def build(max_concurrent: int, max_queue: int) -> Admission:
    return Admission(AdmissionSettings(max_concurrent=max_concurrent, max_queue=max_queue), RouterMetrics())


async def hold(admission: Admission, served: list[int], number: int, release: asyncio.Event) -> None:
    async with admission.slot(Visitor(), asyncio.get_running_loop().time() + 10):
        served.append(number)
        await release.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_requests_are_let_in_in_order_and_the_queue_is_bounded() -> None:
    async def main() -> None:
        admission, served, release = build(2, 2), [], asyncio.Event()
        tasks = [asyncio.create_task(hold(admission, served, i, release)) for i in range(4)]
        await settle()
        assert served == [0, 1]
        with pytest.raises(OverloadedError):
            await hold(admission, served, 9, release)
        release.set()
        await asyncio.gather(*tasks)
        assert served == [0, 1, 2, 3]
        await hold(admission, served, 5, release)
        assert served[-1] == 5

    run(main())


def test_waiting_request_that_is_cancelled_frees_its_place_in_the_queue() -> None:
    async def main() -> None:
        admission, served, release = build(1, 1), [], asyncio.Event()
        first = asyncio.create_task(hold(admission, served, 0, release))
        await settle()
        second = asyncio.create_task(hold(admission, served, 1, release))
        await settle()
        second.cancel()
        await settle()
        third = asyncio.create_task(hold(admission, served, 2, release))
        await settle()
        release.set()
        await asyncio.gather(first, third)
        assert served == [0, 2]

    run(main())


def test_cancelled_in_the_moment_its_turn_comes_passes_it_on() -> None:
    async def main() -> None:
        admission, served = build(1, 5), []
        release_first, release = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(hold(admission, served, 0, release_first))
        await settle()
        second = asyncio.create_task(hold(admission, served, 1, release))
        third = asyncio.create_task(hold(admission, served, 2, release))
        await settle()
        release_first.set()
        await asyncio.sleep(0)  # the first one has left and passed its place to the second, which has not run yet
        second.cancel()
        await settle()
        assert served == [0, 2]
        release.set()
        await asyncio.gather(first, third)

    run(main())


def test_waiting_ends_at_the_deadline() -> None:
    async def main() -> None:
        admission, served, release = build(1, 1), [], asyncio.Event()
        first = asyncio.create_task(hold(admission, served, 0, release))
        await settle()
        with pytest.raises(RequestTimeoutError):
            async with admission.slot(Visitor(), asyncio.get_running_loop().time() + 0.01):
                raise AssertionError
        release.set()
        await first

    run(main())


def test_waiting_requests_go_by_priority_and_then_by_age() -> None:
    async def main() -> None:
        admission, served, release = build(1, 10), [], asyncio.Event()
        first = asyncio.create_task(hold(admission, served, 0, release))
        await settle()

        async def come(number: int, priority: int) -> None:
            async with admission.slot(Visitor(priority=priority), asyncio.get_running_loop().time() + 10):
                served.append(number)

        tasks = []
        for number, priority in ((1, 0), (2, 5), (3, -1), (4, 0), (5, -1)):
            tasks.append(asyncio.create_task(come(number, priority)))
            await settle()
        release.set()
        await asyncio.gather(first, *tasks)
        assert served == [0, 3, 5, 1, 4, 2]

    run(main())


def test_waiting_is_seen_while_it_lasts_and_afterwards() -> None:
    async def main() -> None:
        metrics = RouterMetrics()
        admission = Admission(AdmissionSettings(max_concurrent=1, max_queue=1), metrics)
        served, release = [], asyncio.Event()
        read = metrics.registry.get_sample_value
        assert read("pdserve_router_oldest_waiting_seconds") == 0
        tasks = [asyncio.create_task(hold(admission, served, i, release)) for i in range(2)]
        await settle()
        assert read("pdserve_router_oldest_waiting_seconds") > 0
        assert read("pdserve_router_queue_time_seconds_count") == 1
        release.set()
        await asyncio.gather(*tasks)
        assert read("pdserve_router_oldest_waiting_seconds") == 0
        assert read("pdserve_router_queue_time_seconds_count") == 2

    run(main())


def test_key_that_uses_all_it_may_is_refused_and_pays_for_its_output() -> None:
    async def main() -> None:
        settings = AdmissionSettings(key_max_concurrent=1, key_tokens_per_minute=6000)
        admission = Admission(settings, RouterMetrics())
        deadline_s = asyncio.get_running_loop().time() + 10
        async with admission.slot(Visitor("a"), deadline_s):
            with pytest.raises(OverloadedError, match="1 requests in progress"):
                async with admission.slot(Visitor("a"), deadline_s):
                    raise AssertionError
            async with admission.slot(Visitor("b"), deadline_s):
                pass
        visitor = Visitor("a", num_prompt_tokens=10)
        async with admission.slot(visitor, deadline_s):
            visitor.num_output_tokens = 10**6
        with pytest.raises(OverloadedError, match="6000 tokens a minute"):
            async with admission.slot(Visitor("a"), deadline_s):
                raise AssertionError

    run(main())
