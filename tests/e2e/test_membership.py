"""Instances join and leave while a router runs, whichever way it is told: the same tests for each."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import pytest
from processes import ManagedProcess, wait_until
from replay_service import Replay, Service

from pdserve.announcements import Announcement, AnnouncementBoard
from pdserve.connectors.testing.free_port import find_free_port
from pdserve.connectors.testing.targets.redis_process import RedisProcess
from pdserve.engine.server.announcer import Announcer
from pdserve.protocol import AddRequest, Role, SamplingParams
from pdserve.router.config import PoolSettings
from pdserve.router.fleet import Fleet
from pdserve.router.membership.directory import Directory, follow
from pdserve.router.membership.instances_file import InstancesFile
from pdserve.router.membership.redis_directory import RedisDirectory
from pdserve.router.metrics import RouterMetrics
from pdserve.router.policies import RoutedRequest

sys.path.insert(0, str(Path(__file__).parent.parent))

INTERVAL_S = 0.05
TTL_S = 1.0


class Source(Protocol):
    """One way to list instances, and how operators change it."""

    def open(self) -> Directory: ...

    def list(self, *addresses: str) -> None:
        """Decode instances at these addresses are all there are."""
        ...

    def break_it(self) -> None: ...

    def close(self) -> None: ...


class FileSource:
    def __init__(self, directory: Path) -> None:
        self.path = directory / "instances.toml"

    def open(self) -> Directory:
        return InstancesFile(self.path)

    def list(self, *addresses: str) -> None:
        temporary = self.path.with_suffix(".new")
        temporary.write_text(f"decode = {list(addresses)!r}")
        temporary.replace(self.path)

    def break_it(self) -> None:
        self.path.write_text("decode = [")

    def close(self) -> None:
        pass


class RedisSource:
    def __init__(self, _: Path) -> None:
        self.server = RedisProcess(port=find_free_port())
        self.server.start()
        self.url = f"redis://127.0.0.1:{self.server.port}/0"
        self.announcers: dict[str, Announcer] = {}

    def open(self) -> Directory:
        return RedisDirectory(AnnouncementBoard(self.url), hold_s=TTL_S)

    def list(self, *addresses: str) -> None:
        for address in self.announcers.keys() - set(addresses):
            self.announcers.pop(address).__exit__(None, None, None)
        for address in set(addresses) - self.announcers.keys():
            announcement = Announcement(role=Role.DECODE, address=address, instance_id=address, generation="g")
            self.announcers[address] = Announcer(AnnouncementBoard(self.url), announcement, TTL_S).__enter__()

    def break_it(self) -> None:
        self.server.kill()

    def close(self) -> None:
        self.list()
        self.server.close()


@pytest.fixture(params=[FileSource, RedisSource], ids=["file", "redis"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Source]:
    if request.param is RedisSource and not RedisProcess.is_installed():
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    made = request.param(tmp_path)
    yield made
    made.close()


@pytest.fixture(scope="module")
def replays(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Replay]]:
    directory = tmp_path_factory.mktemp("replays")
    started = [Replay("decode", directory, ["--step-ms", "20"]).start() for _ in range(2)]
    yield started
    for replay in started:
        replay.kill()


async def until(condition: Callable[[], object], what: str) -> None:
    try:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"{what} did not happen") from None


@asynccontextmanager
async def run_fleet(directory: Directory | None, *addresses: str) -> AsyncIterator[Fleet]:
    metrics = RouterMetrics()
    fleet = Fleet(PoolSettings(decode=list(addresses)), router_id="r", model_name="m", metrics=metrics)
    fleet.start()
    following = None if directory is None else asyncio.create_task(follow(directory, fleet.apply, INTERVAL_S))
    try:
        yield fleet
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await fleet.close()


def usable(fleet: Fleet) -> set[str]:
    return {instance.address for instance in fleet.decode.usable}


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(main())  # type: ignore[arg-type]


def test_instances_join_and_leave(source: Source, replays: list[Replay]) -> None:
    one, two = (replay.address for replay in replays)

    async def main() -> None:
        source.list(one)
        async with run_fleet(source.open()) as fleet:
            for expected in ({one}, {one, two}, {two}, set(), {one, two}):
                source.list(*expected)
                await until(lambda expected=expected: usable(fleet) == expected, f"{expected} being the pool")

    run(main)


def test_list_that_cannot_be_read_changes_nothing(source: Source, replays: list[Replay]) -> None:
    one = replays[0].address

    async def main() -> None:
        source.list(one)
        async with run_fleet(source.open()) as fleet:
            await until(lambda: usable(fleet) == {one}, "the instance")
            source.break_it()
            for _ in range(20):
                await asyncio.sleep(INTERVAL_S)
                assert usable(fleet) == {one}

    run(main)


def test_fixed_list_stays(replays: list[Replay]) -> None:
    addresses = {replay.address for replay in replays}

    async def main() -> None:
        async with run_fleet(None, *addresses) as fleet:
            await until(lambda: usable(fleet) == addresses, "both instances")

    run(main)


def test_announcement_of_a_dead_instance_ends_by_itself() -> None:
    if not RedisProcess.is_installed():
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    server = RedisProcess(port=find_free_port())
    server.start()
    board = AnnouncementBoard(f"redis://127.0.0.1:{server.port}/0")
    try:
        announcement = Announcement(role=Role.PREFILL, address="h:1", instance_id="i", generation="g")
        board.put(announcement, ttl_s=0.2)
        assert board.read() == [announcement]

        async def main() -> None:
            await until(lambda: board.read() == [], "the end of its life")

        run(main)
    finally:
        board.close()
        server.close()


def test_leaving_instance_finishes_what_runs_there_and_may_come_back_meanwhile(replays: list[Replay]) -> None:
    one = replays[0].address

    async def main() -> None:
        async with run_fleet(None, one) as fleet:
            await until(lambda: usable(fleet) == {one}, "the instance")
            instance = fleet.decode.choose(RoutedRequest())
            assert instance is not None
            leg = instance.start_leg(
                AddRequest(request_id="a", prompt_token_ids=[1], sampling=SamplingParams(max_tokens=20, seed=1))
            )
            fleet.set_members(Role.DECODE, [])
            assert fleet.decode.choose(RoutedRequest()) is None
            await leg.next_output()
            fleet.set_members(Role.DECODE, [one])
            assert fleet.decode.choose(RoutedRequest()) is instance
            fleet.set_members(Role.DECODE, [])
            while (await leg.next_output()).finish_reason is None:
                pass
            await until(lambda: instance.ready is None, "the end of its session")

    run(main)


def test_case_29_joining_and_leaving_a_hundred_times_leaves_nothing_behind(
    replays: list[Replay], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, "pdserve")  # pytest keeps every record, which would be counted below
    one, two = (replay.address for replay in replays)

    def count() -> dict[str, int]:
        gc.collect()
        return {
            "tasks": len(asyncio.all_tasks()),
            "threads": threading.active_count(),
            "files": len(os.listdir("/proc/self/fd")),
            "objects": len(gc.get_objects()) // 500,
        }

    async def main() -> None:
        async with run_fleet(None, one) as fleet:

            async def come_and_go() -> None:
                fleet.set_members(Role.DECODE, [one, two])
                await until(lambda: usable(fleet) == {one, two}, "joining")
                (leaving,) = (instance for instance in fleet.decode.instances if instance.address == two)
                fleet.set_members(Role.DECODE, [one])
                await until(lambda: leaving.ready is None and not fleet.is_retiring, "leaving")

            for _ in range(10):
                await come_and_go()
            before = count()
            for _ in range(100):
                await come_and_go()
            after = count()
            assert {name: after[name] - before[name] for name in before if after[name] > before[name] + 1} == {}

    run(main)


def test_two_routers_over_the_same_pools(tmp_path: Path) -> None:
    """Neither knows of the other: each gives its clients the same tokens, and the end of one leaves the other alone."""
    first, second = Service(tmp_path), Service(tmp_path)
    second.log = tmp_path / "second.log"
    try:
        instances = [first.add("prefill"), first.add("decode", "--step-ms", "2"), first.add("decode", "--step-ms", "2")]
        listing = tmp_path / "instances.toml"
        lists = {role: [i.address for i in instances if i.role == role] for role in ("prefill", "decode")}
        listing.write_text("\n".join(f"{role} = {addresses!r}" for role, addresses in lists.items()))
        first.instances, kept = [], first.instances
        for router in (first, second):
            router.start("--instances-file", str(listing), "--discovery-interval-s", "0.2")
        for router in (first, second):
            router.wait_for(1, 2)
        expected = first.complete().choices[0].text
        stream = second.stream_text()
        begun = next(stream)
        assert first.router is not None
        first.router.terminate()
        first.router.wait(30)
        assert begun + "".join(stream) == expected
        assert second.complete().choices[0].text == expected
    finally:
        first.instances = kept
        first.close()
        second.close()


def test_real_instance_announces_itself_while_it_serves(tmp_path: Path) -> None:
    if not RedisProcess.is_installed():
        pytest.skip("redis-server is not installed: apt-get install redis-server")
    server = RedisProcess(port=find_free_port())
    server.start()
    url = f"redis://127.0.0.1:{server.port}/0"
    board = AnnouncementBoard(url)
    command = ["pdserve.decode.main", "--port", "0", "--http-port", "0", "--num-blocks", "64", "--discovery", url]
    instance = ManagedProcess("decode", command, tmp_path)
    try:
        instance.start()
        instance.wait_ready()
        (found,) = wait_until(board.read, "its announcement")
        assert f"tcp://{found.address}" == instance.ready["address"]
        assert (found.role, found.generation) == (Role.DECODE, instance.ready["generation"])
        assert instance.stop() == 0
        assert board.read() == []
    finally:
        if instance.is_alive:
            instance.kill()
        board.close()
        server.close()
