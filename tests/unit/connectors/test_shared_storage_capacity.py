from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pdserve.connectors.shared_storage.capacity import CapacityKeeper
from pdserve.connectors.shared_storage.directory import BlockDirectory, UnpublishedFile
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


def put(directory: BlockDirectory, root: Path, number: int, age_s: float, size_bytes: int = FILE_BYTES) -> BlockKey:
    key = key_of(number)
    fill(directory, directory.create_file(key), size_bytes)
    os.utime(path_of(root, number), (NOW - age_s, NOW - age_s))
    return key


def fill(place: BlockDirectory | CapacityKeeper, file: UnpublishedFile, size_bytes: int = FILE_BYTES) -> None:
    os.write(file.fd, file.key.digest[-1:] * size_bytes)
    place.publish_file(file)


def path_of(root: Path, number: int) -> Path:
    return root / "0" / "0" / f"{key_of(number).hex}.kv"


def write(capacity: CapacityKeeper, number: int = 99) -> None:
    """A block more."""
    fill(capacity, capacity.open_file(key_of(number)))


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


def test_the_oldest_goes_and_lends_its_file(directory, clock, tmp_path: Path) -> None:
    for number in range(10):
        put(directory, tmp_path, number, age_s=1000 - number)
    inode = path_of(tmp_path, 0).stat().st_ino
    write(keeper(directory, clock, max_bytes=1000))
    assert present(directory, range(10)) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert path_of(tmp_path, 99).stat().st_ino == inode
    assert path_of(tmp_path, 99).read_bytes() == bytes([99]) * FILE_BYTES


def test_a_full_store_stays_as_full_as_it_is(directory, clock, tmp_path: Path) -> None:
    for number in range(10):
        put(directory, tmp_path, number, age_s=1000 - number)
    inodes = {path.stat().st_ino for path in tmp_path.glob("?/?/*.kv")}
    capacity = keeper(directory, clock, max_bytes=1000)
    for number in range(10, 35):
        write(capacity, number)
        assert len(present(directory, range(35))) == 10
    assert {path.stat().st_ino for path in tmp_path.glob("?/?/*.kv")} == inodes
    assert list((tmp_path / "tmp").iterdir()) == []


def test_nothing_goes_below_the_limit(directory, clock, tmp_path: Path) -> None:
    for number in range(9):
        put(directory, tmp_path, number, age_s=1000)
    write(keeper(directory, clock, max_bytes=1000))
    assert len(present(directory, range(9))) == 9


def test_the_young_go_with_a_warning(directory, clock, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(10):
        put(directory, tmp_path, number, age_s=61 - number)
    capacity = keeper(directory, clock, max_bytes=1000)
    write(capacity, 20)
    assert caplog.records == []
    write(capacity, 21)
    write(capacity, 22)
    assert present(directory, range(10)) == list(range(3, 10))
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(f"{tmp_path} is too small: KV is evicted 59.0 s after its last use")


def test_a_use_counts(directory, clock, tmp_path: Path) -> None:
    for number in range(10):
        put(directory, tmp_path, number, age_s=1000 - number)
    clock.now = os.stat(tmp_path).st_mtime  # a use sets the file system's time, which is the real one
    assert directory.refresh(key_of(0))
    write(keeper(directory, clock, max_bytes=1000))
    assert present(directory, range(10)) == [0, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_use_after_the_inventory_counts(directory, clock, tmp_path: Path) -> None:
    for number in range(10):
        put(directory, tmp_path, number, age_s=1000 - number)
    capacity = keeper(directory, clock, max_bytes=1000)
    write(capacity, 20)
    clock.now = os.stat(tmp_path).st_mtime
    assert directory.refresh(key_of(1))
    write(capacity, 21)
    assert present(directory, range(10)) == [1, 3, 4, 5, 6, 7, 8, 9]


def test_what_is_promised_stays(directory, clock, tmp_path: Path) -> None:
    for number in range(4):
        put(directory, tmp_path, number, age_s=1000 - number)
    capacity = keeper(directory, clock, max_bytes=4 * FILE_BYTES)
    capacity.promise([key_of(number) for number in (0, 1, 3, 20)])
    capacity.promise([key_of(0)])
    write(capacity, 20)
    assert present(directory, range(30)) == [0, 1, 3, 20]
    with pytest.raises(OSError, match="promised to a hand-off"):
        capacity.open_file(key_of(21))
    assert capacity.open_file_on_full_disk(key_of(21)) is None
    capacity.release([key_of(0), key_of(3)])
    write(capacity, 21)
    assert present(directory, range(30)) == [0, 1, 20, 21]
    capacity.release([key_of(number) for number in (0, 1, 20)])
    assert capacity._promises == {}


def test_own_writes_are_counted_and_others_seen_by_the_inventory(directory, clock, tmp_path: Path) -> None:
    capacity = keeper(directory, clock, max_bytes=1000)
    write(capacity, 50)
    for number in range(12):
        put(directory, tmp_path, number, age_s=1000 - number)  # another engine's
    write(capacity, 51)
    assert len(present(directory, range(12))) == 12
    clock.now += 31
    write(capacity, 52)  # fourteen are there: four go, and one gives its file
    assert present(directory, range(12)) == list(range(5, 12))


def test_files_of_other_sizes_are_counted_and_cut(directory, clock, tmp_path: Path) -> None:
    """Another model's blocks."""
    for number, size_bytes in enumerate((400, 50, 300, 250)):
        put(directory, tmp_path, number, age_s=1000 - number, size_bytes=size_bytes)
    capacity = keeper(directory, clock, max_bytes=1000)
    for number in range(20, 24):
        write(capacity, number)
    assert path_of(tmp_path, 20).stat().st_size == FILE_BYTES
    assert len(present(directory, range(20, 24))) == 4
    assert [path_of(tmp_path, number).exists() for number in range(4)] == [False, True, True, True]


def test_a_full_disk_gives_the_oldest_file_however_young(directory, clock, tmp_path: Path) -> None:
    capacity = keeper(directory, clock, max_bytes=1 << 30)
    assert capacity.open_file_on_full_disk(key_of(50)) is None
    for number in range(20):
        put(directory, tmp_path, number, age_s=30 - number)
    inode = path_of(tmp_path, 0).stat().st_ino
    file = capacity.open_file_on_full_disk(key_of(50))
    assert file is not None
    fill(directory, file)
    assert present(directory, range(20)) == list(range(1, 20))
    assert path_of(tmp_path, 50).stat().st_ino == inode


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
    write(capacity)
    assert capacity._limit_bytes == limit


def test_only_blocks_are_removed(directory, clock, tmp_path: Path) -> None:
    put(directory, tmp_path, 0, age_s=1000)
    others = [tmp_path / "0" / "0" / "notes.txt", tmp_path / "readme", tmp_path / "tmp" / "young"]
    for path in others:
        path.write_bytes(bytes(5000))
    write(keeper(directory, clock, max_bytes=FILE_BYTES))
    assert present(directory, range(1)) == []
    assert all(path.exists() for path in others)


def test_what_is_no_file_is_never_written_to(directory, clock, tmp_path: Path) -> None:
    """Links, pipes and folders under a block's name."""
    for number in range(4):
        put(directory, tmp_path, number, age_s=100)
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine")
    paths = [path_of(tmp_path, number) for number in range(3)]
    for path in paths:
        path.unlink()
    paths[0].symlink_to(precious)
    os.mkfifo(paths[1])
    paths[2].mkdir()
    capacity = keeper(directory, clock, max_bytes=FILE_BYTES)
    for number in range(20, 24):
        write(capacity, number)
    assert precious.read_bytes() == b"mine"
    assert all(os.path.lexists(path) for path in paths)
    assert present(directory, range(24)) == [23]


def test_a_link_that_came_after_the_inventory_is_not_followed(directory, clock, tmp_path: Path) -> None:
    put(directory, tmp_path, 0, age_s=100)
    (listed,) = directory.list_files()
    precious = tmp_path / "precious"
    precious.write_bytes(b"mine")
    path_of(tmp_path, 0).unlink()
    path_of(tmp_path, 0).symlink_to(precious)
    assert directory.reuse_file(listed, key_of(1)) is None
    assert precious.read_bytes() == b"mine"
    assert list((tmp_path / "tmp").iterdir()) == []


def test_temporary_files_of_dead_writers_go_after_ten_minutes(directory, clock, tmp_path: Path) -> None:
    put(directory, tmp_path, 0, age_s=0)
    for name, age_s in (("dead", 601), ("alive", 599)):
        (tmp_path / "tmp" / name).touch()
        os.utime(tmp_path / "tmp" / name, (NOW - age_s, NOW - age_s))
    write(keeper(directory, clock, max_bytes=1000))
    assert [path.name for path in (tmp_path / "tmp").iterdir()] == ["alive"]


def test_a_reused_file_does_not_look_like_a_dead_writers(directory, clock, tmp_path: Path) -> None:
    put(directory, tmp_path, 0, age_s=5000)
    clock.now = os.stat(tmp_path).st_mtime  # the file system's time is the real one
    file = keeper(directory, clock, max_bytes=FILE_BYTES).open_file(key_of(1))
    assert directory.reap_stale_temps() == 0
    fill(directory, file)
    assert present(directory, range(2)) == [1]


def test_two_keepers_never_get_one_file(directory, clock, tmp_path: Path) -> None:
    """Both know the same files; what the other has taken, or removed, is passed over."""
    for number in range(10):
        put(directory, tmp_path, number, age_s=1000 - number)
    first, second = (keeper(directory, clock, max_bytes=1000) for _ in range(2))
    for capacity in (first, second):
        capacity._take_inventory()
    files = [capacity.open_file(key_of(20 + index)) for index, capacity in enumerate([first, second] * 3)]
    assert len({os.fstat(file.fd).st_ino for file in files}) == 6
    directory.remove(key_of(6))
    files.append(second.open_file(key_of(26)))
    for file in files:
        fill(directory, file)
    assert present(directory, range(30)) == [8, 9, *range(20, 27)]


def test_files_being_written_are_counted(directory, clock, tmp_path: Path) -> None:
    capacity = keeper(directory, clock, max_bytes=3 * FILE_BYTES)
    files = [capacity.open_file(key_of(number)) for number in range(3)]
    with pytest.raises(OSError, match="promised"):
        capacity.open_file(key_of(3))
    clock.now += 31
    with pytest.raises(OSError, match="promised"):
        capacity.open_file(key_of(3))
    for file in files:
        fill(capacity, file)
    write(capacity, 3)
    assert len(present(directory, range(4))) == 3


def test_what_is_given_up_makes_room_again(directory, clock, tmp_path: Path) -> None:
    put(directory, tmp_path, 0, age_s=1000)
    capacity = keeper(directory, clock, max_bytes=2 * FILE_BYTES)
    for _ in range(5):
        capacity.discard_file(capacity.open_file(key_of(1)))
    assert present(directory, range(2)) == [0]
    (tmp_path / "tmp").rmdir()
    (tmp_path / "tmp").touch()
    for _ in range(5):
        with pytest.raises(NotADirectoryError):
            capacity.open_file(key_of(1))
    (tmp_path / "tmp").unlink()
    write(capacity, 1)
    assert present(directory, range(2)) == [0, 1]


def test_prepared_writes_take_no_inventory(directory, clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(10):
        put(directory, tmp_path, number, age_s=1000 - number)
    capacity = keeper(directory, clock, max_bytes=1000)
    capacity.prepare(4)
    clock.now += 20  # soon the inventory is too old
    capacity.prepare(4)
    assert present(directory, range(10)) == list(range(10))  # nothing is evicted before its room is needed
    monkeypatch.setattr(directory, "list_files", lambda: pytest.fail("a write took an inventory"))
    clock.now += 11
    for number in range(20, 24):
        write(capacity, number)
    assert present(directory, range(10)) == list(range(4, 10))


def test_a_directory_that_is_gone_is_told_by_the_write(directory, clock, tmp_path: Path) -> None:
    put(directory, tmp_path, 0, age_s=1)
    capacity = keeper(directory, clock, max_bytes=1000)
    shutil.rmtree(tmp_path)
    capacity.prepare(1)
    with pytest.raises(FileNotFoundError):
        capacity.open_file(key_of(1))
