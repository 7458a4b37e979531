from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdserve.connectors.shared_storage.capacity import CapacityKeeper
from pdserve.connectors.shared_storage.directory import BlockDirectory
from pdserve.kv_layout import BlockKey

FILE_BYTES = 100
NOW = 1_000_000.0


class Clock:
    def __init__(self, now: float = NOW) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"), 4)


def put(directory: BlockDirectory, root: Path, number: int, age_s: float) -> BlockKey:
    key = key_of(number)
    directory.publish(key, lambda fd: (os.write(fd, bytes(FILE_BYTES)), None)[1])
    os.utime(root / "0" / "0" / f"{key.hex}.kv", (NOW - age_s, NOW - age_s))
    return key


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory(tmp_path: Path, clock: Clock) -> BlockDirectory:
    return BlockDirectory(tmp_path, FILE_BYTES, clock)


def keeper(directory: BlockDirectory, clock: Clock, max_bytes: int | None, min_age_s: float = 60.0) -> CapacityKeeper:
    return CapacityKeeper(directory, max_bytes=max_bytes, min_age_s=min_age_s, clock=clock, wall_clock=clock)


def present(directory: BlockDirectory, numbers: range) -> list[int]:
    return [number for number in numbers if directory.has(key_of(number))]


def test_the_oldest_go_first_down_to_the_low_water_mark(directory, clock, tmp_path: Path) -> None:
    for number in range(10):
        put(directory, tmp_path, number, age_s=1000 - number)
    keeper(directory, clock, max_bytes=1000).make_room(FILE_BYTES)
    assert present(directory, range(10)) == [2, 3, 4, 5, 6, 7, 8, 9]


def test_nothing_goes_below_the_limit(directory, clock, tmp_path: Path) -> None:
    for number in range(9):
        put(directory, tmp_path, number, age_s=1000)
    keeper(directory, clock, max_bytes=1000).make_room(FILE_BYTES)
    assert len(present(directory, range(9))) == 9


def test_the_young_are_spared_while_the_limit_allows(directory, clock, tmp_path: Path) -> None:
    """One old file is not enough for the low-water mark, but for the limit; so no young one goes."""
    put(directory, tmp_path, 0, age_s=61)
    for number in range(1, 10):
        put(directory, tmp_path, number, age_s=59)
    keeper(directory, clock, max_bytes=1000).make_room(FILE_BYTES)
    assert present(directory, range(10)) == list(range(1, 10))


def test_the_limit_holds_even_when_all_are_young(directory, clock, tmp_path: Path) -> None:
    for number in range(10):
        put(directory, tmp_path, number, age_s=30 - number)
    capacity = keeper(directory, clock, max_bytes=1000)
    capacity.make_room(FILE_BYTES)
    assert present(directory, range(10)) == list(range(1, 10))


def test_a_use_counts(directory, clock, tmp_path: Path) -> None:
    for number in range(10):
        put(directory, tmp_path, number, age_s=1000 - number)
    clock.now = os.stat(tmp_path).st_mtime  # a use sets the file system's time, which is the real one
    assert directory.refresh(key_of(0))
    keeper(directory, clock, max_bytes=1000).make_room(FILE_BYTES)
    assert present(directory, range(10)) == [0, 3, 4, 5, 6, 7, 8, 9]


def test_own_writes_are_counted_and_others_seen_by_the_inventory(directory, clock, tmp_path: Path) -> None:
    capacity = keeper(directory, clock, max_bytes=1000)
    capacity.make_room(FILE_BYTES)
    for number in range(12):
        put(directory, tmp_path, number, age_s=1000 - number)  # another engine's
    capacity.make_room(FILE_BYTES)
    assert len(present(directory, range(12))) == 12
    clock.now += 31
    capacity.make_room(FILE_BYTES)
    assert len(present(directory, range(12))) == 8


def test_a_full_disk_takes_the_oldest_however_young(directory, clock, tmp_path: Path) -> None:
    capacity = keeper(directory, clock, max_bytes=1 << 30)
    assert not capacity.make_room_on_full_disk(FILE_BYTES)
    for number in range(20):
        put(directory, tmp_path, number, age_s=30 - number)
    assert capacity.make_room_on_full_disk(FILE_BYTES)
    assert present(directory, range(20)) == [16, 17, 18, 19]


@pytest.mark.parametrize(
    ("total", "free", "used_files", "limit"),
    [
        (100_000, 90_000, 0, 25_000),  # a quarter of the disk
        (100_000, 10_000, 0, 5_000),  # what is free less 5 %
        (100_000, 10_000, 10, 6_000),  # and what is ours already
        (100_000, 1_000, 0, 0),  # others filled it
    ],
)
def test_the_default_limit(directory, clock, tmp_path, monkeypatch, total, free, used_files, limit) -> None:
    for number in range(used_files):
        put(directory, tmp_path, number, age_s=0)
    monkeypatch.setattr(directory, "get_space", lambda: (total, free))
    capacity = keeper(directory, clock, max_bytes=None)
    capacity.make_room(FILE_BYTES)
    assert capacity._limit_bytes == limit


def test_only_blocks_are_removed(directory, clock, tmp_path: Path) -> None:
    put(directory, tmp_path, 0, age_s=1000)
    others = [tmp_path / "0" / "0" / "notes.txt", tmp_path / "readme", tmp_path / "tmp" / "young"]
    for path in others:
        path.write_bytes(bytes(5000))
    keeper(directory, clock, max_bytes=FILE_BYTES).make_room(FILE_BYTES)
    assert present(directory, range(1)) == []
    assert all(path.exists() for path in others)


def test_temporary_files_of_dead_writers_go_after_ten_minutes(directory, clock, tmp_path: Path) -> None:
    put(directory, tmp_path, 0, age_s=0)
    for name, age_s in (("dead", 601), ("alive", 599)):
        (tmp_path / "tmp" / name).touch()
        os.utime(tmp_path / "tmp" / name, (NOW - age_s, NOW - age_s))
    keeper(directory, clock, max_bytes=1000).make_room(FILE_BYTES)
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == ["alive"]


def test_two_keepers_may_evict_at_once(directory, clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one removes a file between inventory and eviction."""
    for number in range(10):
        put(directory, tmp_path, number, age_s=1000 - number)
    real = directory.list_files

    def list_then_lose():
        files = real()
        directory.remove(key_of(0))
        return files

    monkeypatch.setattr(directory, "list_files", list_then_lose)
    keeper(directory, clock, max_bytes=1000).make_room(FILE_BYTES)
    assert present(directory, range(10)) == [2, 3, 4, 5, 6, 7, 8, 9]
