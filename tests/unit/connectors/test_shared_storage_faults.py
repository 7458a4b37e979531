"""What the disk, other processes and other people may do to the directory: failures as data, exact answers."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pdserve.connectors.base import MatchResult
from pdserve.connectors.blocks.block_format import HEADER_BYTES
from pdserve.connectors.testing import EngineHarness
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.kv_layout import BlockHasher

S = TINY_SPEC.block_size
PROMPT = list(range(4 * S + 1))
BAD = 2  # the block that the tests damage
FILE_BYTES = HEADER_BYTES + TINY_SPEC.block_bytes


def path_of(engine: EngineHarness, store: Path, index: int = BAD) -> Path:
    key = BlockHasher(engine.context.identity.fingerprint).block_keys(PROMPT, S)[index]
    return store / key.hex[0] / key.hex[1] / f"{key.hex}.kv"


def load_damaged(decode: EngineHarness, damage: Callable[[], object], name: str = "d") -> int:
    """Damage the store between lookup and load; the tokens that arrived."""
    decode.submit(name, PROMPT)
    match = decode.lookup(name)
    assert match.num_tokens == len(PROMPT)
    decode.admit(name, match.num_tokens)
    damage()
    decode.step_until(lambda: name in decode.received)
    return decode.received[name]


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 1, FILE_BYTES - 1])
def test_a_truncated_file_is_a_miss_and_a_reported_failure(make_engine, store: Path, length: int) -> None:
    prefill, decode = make_engine("prefill"), make_engine("decode")
    prefill.send("p", PROMPT)
    path = path_of(prefill, store)
    assert load_damaged(decode, lambda: os.truncate(path, length)) == BAD * S
    assert decode.stats.failures == {"truncated": 1}
    assert not path.exists()
    path.write_bytes(bytes(length))
    decode.submit("next", PROMPT)
    assert decode.lookup("next").num_tokens == BAD * S


@pytest.mark.parametrize(
    "plant", [os.mkfifo, lambda path: path.symlink_to(path), lambda path: path.symlink_to("/dev/zero")]
)
def test_what_is_no_file_is_a_failure_at_once_and_is_replaced(make_engine, store: Path, plant) -> None:
    prefill, decode = make_engine("prefill"), make_engine("decode")
    prefill.send("p", PROMPT)
    path = path_of(prefill, store)

    def replace() -> None:
        path.unlink()
        plant(path)

    assert load_damaged(decode, replace) == BAD * S
    assert decode.stats.failures == {"io": 1}
    assert decode.load("next", PROMPT) == BAD * S
    assert prefill.send("again", PROMPT)
    assert decode.load("last", PROMPT) == len(PROMPT)


def test_a_link_out_of_the_store_leads_nowhere(make_engine, store: Path, tmp_path: Path) -> None:
    """Also to a good block: whose file it is, is not ours to say, and using it would touch it."""
    prefill, decode = make_engine("prefill"), make_engine("decode")
    prefill.send("p", PROMPT)
    path, outside = path_of(prefill, store), tmp_path / "outside"
    path.rename(outside)
    os.utime(outside, (1.0, 1.0))
    path.symlink_to(outside)
    assert decode.load("d", PROMPT) == BAD * S
    assert prefill.send("again", PROMPT)
    assert not path.is_symlink()
    assert outside.stat().st_mtime == 1.0


@pytest.mark.parametrize(
    ("offset", "kind"),
    [
        (0, "corrupt"),  # magic
        (8, "foreign"),  # format version
        (12, "foreign"),  # number of tokens
        (16, "foreign"),  # key
        (32, "foreign"),  # model
        (48, "foreign"),  # layout
        (64, "foreign"),  # payload length
        (72, "corrupt"),  # checksum
        (HEADER_BYTES, "corrupt"),
        (FILE_BYTES - 1, "corrupt"),
    ],
)
def test_a_flipped_bit_is_found_wherever_it_is(make_engine, store: Path, offset: int, kind: str) -> None:
    prefill, decode = make_engine("prefill"), make_engine("decode")
    prefill.send("p", PROMPT)
    path = path_of(prefill, store)
    assert load_damaged(decode, lambda: flip(path, offset)) == BAD * S
    assert decode.stats.failures == {kind: 1}
    assert not path.exists()
    assert prefill.send("again", PROMPT)
    assert decode.load("d2", PROMPT) == len(PROMPT)


def test_junk_behind_the_payload_is_corrupt(make_engine, store: Path) -> None:
    prefill, decode = make_engine("prefill"), make_engine("decode")
    prefill.send("p", PROMPT)
    path = path_of(prefill, store)
    assert load_damaged(decode, lambda: path.write_bytes(path.read_bytes() + b"x")) == BAD * S
    assert decode.stats.failures == {"corrupt": 1}


def test_unverified_bytes_do_not_stay_in_memory(make_engine, store: Path) -> None:
    prefill, decode = make_engine("prefill"), make_engine("decode")
    prefill.send("p", PROMPT)
    decode.submit("d", PROMPT)
    block_ids = decode.admit("d", decode.lookup("d").num_tokens or 0)
    flip(path_of(prefill, store), FILE_BYTES - 1)
    decode.step_until(lambda: "d" in decode.received)
    assert not decode.read_block(block_ids[BAD]).any()


def test_another_keys_file_in_place_is_foreign(make_engine, store: Path) -> None:
    prefill, decode = make_engine("prefill"), make_engine("decode")
    prefill.send("p", PROMPT)
    path, other = path_of(prefill, store), path_of(prefill, store, 1)
    assert load_damaged(decode, lambda: shutil.copy(other, path)) == BAD * S
    assert decode.stats.failures == {"foreign": 1}


def test_another_models_file_in_place_is_foreign(make_engine, store: Path) -> None:
    prefill, decode = make_engine("prefill"), make_engine("decode")
    stranger = make_engine("prefill", weights="weights-2")
    prefill.send("p", PROMPT)
    stranger.send("p", PROMPT)
    path, other = path_of(prefill, store), path_of(stranger, store)
    assert load_damaged(decode, lambda: shutil.copy(other, path)) == BAD * S
    assert decode.stats.failures == {"foreign": 1}


def test_evicted_between_lookup_and_load(make_engine, store: Path) -> None:
    prefill, decode = make_engine("prefill"), make_engine("decode")
    prefill.send("p", PROMPT)
    assert load_damaged(decode, path_of(prefill, store).unlink) == BAD * S
    assert decode.stats.failures == {"missing": 1}
    assert load_damaged_first(decode, prefill, store) == 0


def load_damaged_first(decode: EngineHarness, prefill: EngineHarness, store: Path) -> int:
    prefill.send("again", PROMPT)
    return load_damaged(decode, path_of(prefill, store, 0).unlink, "d2")


def test_an_abort_during_a_load_that_fails(make_engine, store: Path) -> None:
    prefill, decode = make_engine("prefill"), make_engine("decode")
    prefill.send("p", PROMPT)
    decode.submit("d", PROMPT)
    decode.admit("d", decode.lookup("d").num_tokens or 0)
    path_of(prefill, store).unlink()
    decode.finish("d")
    decode.step_until(lambda: decode.is_idle)
    assert decode.received == {"d": BAD * S}
    assert decode.num_used_blocks == 0
    assert decode.scheduler._failed_loads == set()


def test_what_could_not_be_read_is_not_promised_again(make_engine, store: Path) -> None:
    prefill, decode = make_engine("prefill"), make_engine("decode")
    prefill.send("p", PROMPT)
    path = path_of(prefill, store)
    load_damaged(decode, path.unlink)
    prefill.send("again", PROMPT)
    decode.step(preempted=["d"])
    assert decode.lookup("d") == MatchResult(0)
    decode.submit("other", PROMPT)
    assert decode.lookup("other").num_tokens == len(PROMPT)


def test_a_claim_beyond_the_keys_is_a_failure(make_engine) -> None:
    """An engine that asks for more than was promised gets what there is, and is told so."""
    prefill, decode = make_engine("prefill"), make_engine("decode")
    prefill.send("p", PROMPT)
    decode.submit("d", PROMPT)
    decode.lookup("d")
    decode.admit("d", len(PROMPT) + S)
    decode.step_until(lambda: "d" in decode.received)
    assert decode.received["d"] == len(PROMPT)


def test_a_file_that_cannot_be_read(make_engine, store: Path) -> None:
    prefill, decode = make_engine("prefill"), make_engine("decode")
    prefill.send("p", PROMPT)
    path = path_of(prefill, store)

    def replace_by_directory() -> None:
        path.unlink()
        path.mkdir()

    assert load_damaged(decode, replace_by_directory) == BAD * S
    assert decode.stats.failures == {"io": 1}


@pytest.mark.parametrize("num_read", [0, 8, 40, HEADER_BYTES, HEADER_BYTES + 1, FILE_BYTES - 1])
def test_a_file_written_over_while_it_is_read_is_a_miss(
    make_engine, store: Path, monkeypatch: pytest.MonkeyPatch, num_read: int
) -> None:
    """A full store: after so many bytes of a block, all files become another prompt's, under the reader's hands."""
    prefill = make_engine("prefill", max_bytes=5 * FILE_BYTES, min_age_s=0)
    decode = make_engine("decode", reader_threads=1, reader_nice=0)  # the other prompt is saved on its reader
    prefill.send("p", PROMPT)
    decode.submit("d", PROMPT)
    block_ids = decode.admit("d", decode.lookup("d").num_tokens or 0)
    inode = path_of(prefill, store).stat().st_ino
    other = [7] * len(PROMPT)
    real_read = os.preadv

    def read_beside_writer(fd, parts, offset):
        if os.fstat(fd).st_ino != inode or offset:
            return real_read(fd, parts, offset)
        start = [memoryview(parts[0])[:num_read], memoryview(parts[1])[: max(num_read - HEADER_BYTES, 0)]]
        count = real_read(fd, start, 0) if num_read else 0
        prefill.prefill("other", other)
        prefill.step_until(lambda: prefill.sent.get("other", False), timeout_s=60)
        return count or real_read(fd, parts, 0)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", read_beside_writer)
        decode.step_until(lambda: "d" in decode.received, timeout_s=120)
    assert decode.received["d"] == BAD * S
    assert decode.stats.failures == {"missing": 1}
    assert not decode.read_block(block_ids[BAD]).any()
    assert inode in {path.stat().st_ino for path in store.glob("?/?/*.kv")}
    assert make_engine("decode").load("d", other) == len(other)


def test_loads_beside_a_full_stores_writers_bring_no_foreign_byte(make_engine) -> None:
    """The harness compares every token that is said to be good."""
    prefill = make_engine("prefill", max_bytes=12 * FILE_BYTES, min_age_s=0, writer_threads=3)
    decode = make_engine("decode", reader_threads=3)
    is_over = threading.Event()

    def write_on() -> None:
        for turn in itertools.count():
            if is_over.is_set():
                return
            prefill.send(f"p{turn}", [turn % 6] * (4 * S))

    writer = threading.Thread(target=write_on)
    writer.start()
    num_whole = 0
    try:
        deadline = time.monotonic() + 60
        for turn in itertools.count():
            num_whole += decode.load(f"d{turn}", [turn % 6] * (4 * S)) == 4 * S
            decode.finish(f"d{turn}")
            if num_whole == 50 or time.monotonic() > deadline:
                break
    finally:
        is_over.set()
        writer.join(60)
    assert num_whole == 50
    assert set(decode.stats.failures) <= {"missing"}


# --- writing ----------------------------------------------------------------------------------------------


def send_until_whole(engine: EngineHarness, prompt: list[int], timeout_s: float = 10.0) -> int:
    """Send again and again, as traffic does, until the store takes it; how often it failed before."""
    deadline = time.monotonic() + timeout_s
    for attempt in range(1 << 30):
        if engine.send(f"retry-{len(prompt)}-{attempt}", prompt):
            return attempt
        assert time.monotonic() < deadline, "saving was not taken up again"
    raise AssertionError


def test_a_vanished_directory_costs_a_warning_and_comes_back(
    make_engine, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = make_engine("prefill"), make_engine("decode")
    shutil.rmtree(store)
    with caplog.at_level(logging.WARNING, "pdserve.connectors"):
        assert not prefill.send("a", PROMPT)
        assert not prefill.send("b", PROMPT)
    assert prefill.stats.failures == {"missing": 10}
    assert [record.getMessage() for record in caplog.records] == [
        f"KV cannot be saved to {store}: No such file or directory; will try again"
    ]
    assert not store.exists()
    assert decode.load("d", PROMPT) == 0
    store.mkdir()
    send_until_whole(prefill, PROMPT)
    assert decode.load("d2", PROMPT) == len(PROMPT)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.EROFS, "permission"),
        (errno.EACCES, "permission"),
        (errno.ENOSPC, "no_space"),
        (errno.EDQUOT, "no_space"),
        (errno.EIO, "io"),
        (errno.EFBIG, "io"),
    ],
)
@pytest.mark.parametrize("call", ["open", "pwrite", "rename"])
def test_a_write_that_fails_is_counted_and_leaves_nothing(
    make_engine, store: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: str, call: str
) -> None:
    prefill = make_engine("prefill")
    real = getattr(os, call)

    def fail(*args, **kwargs):
        if call != "open" or "/tmp/" in str(args[0]).removeprefix(str(store)):
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        assert not prefill.send("p", PROMPT)
    assert prefill.stats.failures == {kind: 5}
    assert [path for path in store.rglob("*") if path.is_file()] == []
    send_until_whole(prefill, PROMPT)


def test_a_write_in_pieces_is_whole(make_engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems may write and read less than they were asked to."""
    real_write, real_read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real_write(fd, data[:7], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, parts, offset: real_read(fd, [parts[0][:11]], offset))
    assert make_engine("prefill").send("p", PROMPT)
    assert make_engine("decode").load("d", PROMPT) == len(PROMPT)


@pytest.fixture
def small_disk(store: Path) -> Iterator[Path]:
    """A file system of its own with room for about eight blocks (a file takes a page of 4 KiB)."""
    store.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k,nr_inodes=200", "tmpfs", str(store)]
    if os.getuid() != 0 or subprocess.run(mount, check=False, capture_output=True, timeout=30).returncode:
        pytest.skip("mounting needs privileges")
    yield store
    subprocess.run(["umount", str(store)], check=True, timeout=30)


def test_a_full_disk_evicts_the_oldest_and_goes_on(make_engine, small_disk: Path) -> None:
    prefill = make_engine("prefill", max_bytes="1GiB")
    for number in range(20):
        prompt = [number] * (2 * S)
        assert prefill.send(f"p{number}", prompt)
        assert make_engine("decode").load("d", prompt) == len(prompt)
    assert prefill.stats.failures == {}


def fill_up(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def test_a_disk_filled_by_others_is_a_counted_failure(make_engine, small_disk: Path) -> None:
    prefill = make_engine("prefill", max_bytes="1GiB")
    filler = small_disk / "other"
    fill_up(filler)
    assert not prefill.send("p", PROMPT)
    assert prefill.stats.failures == {"no_space": 5}
    filler.unlink()
    send_until_whole(prefill, PROMPT)


@pytest.mark.parametrize("chunk", [None, S])
@pytest.mark.parametrize("layerwise", [False, True])
def test_a_store_smaller_than_a_prompt_keeps_its_beginning_and_says_so(
    make_engine, store: Path, chunk: int | None, layerwise: bool
) -> None:
    prefill = make_engine("prefill", max_bytes=3 * FILE_BYTES, min_age_s=0, layerwise=layerwise, writer_threads=1)
    other = [7] * (2 * S)
    assert prefill.send("other", other)
    assert not prefill.send("p", PROMPT, chunk=chunk)
    assert prefill.stats.failures.keys() == {"no_space"}
    assert make_engine("decode").load("d", PROMPT) == 3 * S
    send_until_whole(prefill, other)
    assert make_engine("decode").load("d", other) == len(other)
    assert prefill.worker._store._capacity._promises == {}


def test_a_prompt_does_not_evict_what_another_ones_hand_off_needs(make_engine) -> None:
    prefill = make_engine("prefill", max_bytes=5 * FILE_BYTES, min_age_s=0)
    prefill.submit("first", PROMPT)
    prefill.admit("first", 0)
    prefill.step({"first": 3 * S})
    prefill.step_until(lambda: not prefill.worker._saver._writing)
    assert not prefill.send("second", [7] * (3 * S))
    send_until_whole(prefill, [8] * (2 * S))  # for so much there is room, and the pause after a failure has ended
    prefill.step({"first": S + 1})
    prefill.finish("first", handoff=True)
    prefill.step_until(lambda: "first" in prefill.sent)
    assert prefill.sent["first"]
    assert make_engine("decode").load("d", PROMPT) == len(PROMPT)


def test_an_aborted_requests_blocks_may_go(make_engine) -> None:
    prefill = make_engine("prefill", max_bytes=5 * FILE_BYTES, min_age_s=0)
    prefill.submit("gone", PROMPT)
    prefill.admit("gone", 0)
    prefill.step({"gone": len(PROMPT)})
    prefill.finish("gone")
    prefill.step_until(lambda: not prefill.worker._saver._writing)
    assert prefill.send("p", [7] * len(PROMPT))
    assert prefill.worker._store._capacity._promises == {}


def test_a_writer_killed_half_way_leaves_a_miss(make_engine, store: Path) -> None:
    """Two writers of one key; the one that dies in the middle of its file publishes nothing."""
    code = """
import os, signal, sys
from pdserve.connectors.shared_storage import SharedStorageConnector
from pdserve.connectors.testing import EngineHarness, build_context
from pdserve.protocol import Role

real = os.pwrite
def write_half_and_die(fd, data, offset):
    real(fd, data[: len(data) // 2], offset)
    os.kill(os.getpid(), signal.SIGKILL)
os.pwrite = write_half_and_die
engine = EngineHarness(SharedStorageConnector, build_context(Role.PREFILL, {"path": sys.argv[1]}))
engine.send("p", list(range(17)))
"""
    writer = subprocess.run([sys.executable, "-c", code, str(store)], check=False, timeout=120)
    assert writer.returncode == -signal.SIGKILL
    leftovers = list((store / "tmp").iterdir())
    assert leftovers  # one, or one of each writer thread
    decode = make_engine("decode")
    assert decode.load("d", PROMPT) == 0
    for leftover in leftovers:
        os.utime(leftover, (0, 0))
    assert make_engine("prefill").send("p", PROMPT)
    assert list((store / "tmp").iterdir()) == []
    assert decode.load("d2", PROMPT) == len(PROMPT)


def test_slow_writing_holds_the_step_back_then_drops(make_engine) -> None:
    """Room for two blocks in staging memory and a writer that is held: the step waits, then gives up on the rest."""
    prefill = make_engine("prefill", max_staging_bytes=2 * FILE_BYTES, save_timeout_s=0.05, writer_threads=1)
    gate = threading.Event()
    prefill.worker._writers.submit(gate.wait)
    prefill.prefill("p", PROMPT)
    prefill.step()
    assert prefill.stats.failures == {"timeout": 3}
    assert "p" not in prefill.sent
    gate.set()
    prefill.step_until(lambda: "p" in prefill.sent)
    assert prefill.sent == {"p": False}
    assert prefill.stats.num_blocks_saved == 2
    send_until_whole(prefill, PROMPT)


def test_staging_memory_is_reused(make_engine) -> None:
    prefill = make_engine("prefill", max_staging_bytes=2 * FILE_BYTES)
    for number in range(10):
        assert prefill.send(f"p{number}", [number] * 17)
    assert prefill.worker._staging.num_free == 2
