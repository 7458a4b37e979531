"""LMCache over files, for real: tiers, damage, a store that hangs, a store that is gone, and what is left behind."""

from __future__ import annotations

import asyncio
import gc
import itertools
import multiprocessing
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lmcache.v1.cache_engine", reason="lmcache is not installed here: make test-lmcache runs these")

from lmcache.observability import LMCStatsMonitor
from lmcache.v1.cache_engine import LMCacheEngine
from lmcache.v1.storage_backend.connector.fs_connector import FSConnector

from pdserve.connectors.blocks.block_format import BlockFormat
from pdserve.connectors.blocks.failures import Failure
from pdserve.connectors.lmcache import LMCacheConnector, cache_engine
from pdserve.connectors.lmcache.deadline_calls import DeadlineCalls
from pdserve.connectors.lmcache.directories import EngineDirectories
from pdserve.connectors.lmcache.lmcache_store import LMCacheStore
from pdserve.connectors.lmcache.opening import open_for_transfers
from pdserve.connectors.lmcache.options import parse_options
from pdserve.connectors.lmcache.shared_files import SharedFiles
from pdserve.connectors.testing import EngineHarness, build_context
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.errors import ConfigError
from pdserve.kv_layout import BlockHasher
from pdserve.protocol import Role

S = TINY_SPEC.block_size
NUMBERS = itertools.count()
PROMPT = list(range(100, 100 + 4 * S + 1))  # four whole blocks and one token


def find_file(engine: EngineHarness, store: Path, index: int) -> Path:
    key = BlockHasher(engine.context.identity.fingerprint).block_keys(PROMPT, S)[index]
    (path,) = store.glob(f"*@{int(key.hex, 16):x}@uint8.data")
    return path


@pytest.mark.parametrize("length", [1, S - 1, S, S + 1, 2 * S, 40 * S + 3])
def test_a_whole_prompt_travels(make_engine: Any, length: int) -> None:
    prompt = list(range(length))
    assert make_engine("prefill").send("p", prompt)
    decode = make_engine("decode")
    assert decode.load("d", prompt) == length
    decode.finish("d")
    assert decode.num_used_blocks == 0
    assert (decode.stats.num_blocks_loaded, decode.stats.failures) == (TINY_SPEC.num_blocks_for(length), {})


def test_two_models_in_one_store_never_meet(make_engine: Any) -> None:
    make_engine("prefill").send("p", PROMPT)
    other = make_engine("decode", weights="other")
    other.submit("d", PROMPT)
    assert other.lookup("d").num_tokens == 0


def test_names_in_the_store_carry_the_models_fingerprint(make_engine: Any, store: Path) -> None:
    prefill = make_engine("prefill")
    prefill.send("p", PROMPT)
    fingerprint = prefill.context.identity.fingerprint
    assert {path.name.partition("@")[0] for path in store.glob("*.data")} == {f"pdserve-{fingerprint}"}


def test_two_engines_that_write_one_block_write_to_two_places(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    temps: list[Path] = []
    get_paths = FSConnector._get_file_and_tmp_path

    def note_paths(self: FSConnector, key: Any) -> tuple[Path, Path]:
        paths = get_paths(self, key)
        temps.append(paths[1])
        return paths

    monkeypatch.setattr(FSConnector, "_get_file_and_tmp_path", note_paths)
    monkeypatch.setattr(cache_engine.CacheEngine, "has", lambda *_: False)
    for _ in range(2):
        make_engine("prefill").send("p", PROMPT[:1])
    assert temps[0].name == temps[1].name
    assert temps[0].parent != temps[1].parent


def test_a_directory_that_somebody_emptied_is_filled_again(make_engine: Any, store: Path, tmp_path: Path) -> None:
    tiers = {"local_disk_path": str(tmp_path / "disk")}
    prefill, decode = make_engine("prefill", **tiers), make_engine("decode", **tiers)
    assert prefill.send("p", PROMPT)
    for path in (*store.iterdir(), *(tmp_path / "disk").iterdir()):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert decode.load("d", PROMPT) == 0
    assert prefill.send("again", PROMPT)
    assert decode.load("next", PROMPT) == len(PROMPT)


def test_what_is_stored_is_not_written_again(make_engine: Any, store: Path) -> None:
    prefill = make_engine("prefill")
    prefill.send("p", PROMPT)
    times = {path: path.stat().st_mtime_ns for path in store.glob("*.data")}
    assert len(times) == 5
    prefill.send("q", PROMPT)
    assert {path: path.stat().st_mtime_ns for path in store.glob("*.data")} == times
    assert prefill.stats.num_blocks_saved == 5


class TestTiers:
    def test_the_cpu_tier_serves_what_the_shared_one_lost(self, make_engine: Any, store: Path) -> None:
        make_engine("prefill").send("p", PROMPT)
        decode = make_engine("decode", cpu_cache=True)
        assert decode.load("first", PROMPT) == len(PROMPT)
        decode.submit("second", PROMPT)
        promised = decode.lookup("second").num_tokens
        for path in store.glob("*.data"):
            path.unlink()
        decode.admit("second", promised)
        decode.step_until(lambda: "second" in decode.received)
        assert decode.received["second"] == len(PROMPT)
        assert decode.stats.failures == {}

    def test_the_cpu_tier_promises_nothing(self, make_engine: Any, store: Path) -> None:
        prefill = make_engine("prefill", cpu_cache=True)
        prefill.send("p", PROMPT)
        find_file(prefill, store, 2).unlink()
        prefill.submit("q", PROMPT)
        assert prefill.lookup("q").num_tokens == 2 * S

    def test_only_what_is_shared_is_counted(self, store: Path, tmp_path: Path) -> None:
        context = build_context(Role.PREFILL, {"url": f"fs://{store}", "max_cpu_bytes": 4 << 20})
        options, calls = parse_options(context), DeadlineCalls("test", 2)
        directories = EngineDirectories(options, can_write=True)
        engine = open_for_transfers(context, options, directories, calls)
        (key,) = BlockHasher(context.identity.fingerprint).block_keys(PROMPT[:S], S)
        write = engine.begin_write(key, memoryview(bytes(BlockFormat(context.identity, TINY_SPEC).value_bytes)))
        assert not isinstance(write, Failure)
        assert write.exception(10) is None
        assert engine.count_stored_run([key]) == 1
        next(store.glob("*.data")).unlink()
        assert engine.count_stored_run([key]) == 0
        calls.close_after(engine.close, 10)

    def test_the_local_disk_tier_serves_too_and_is_removed(self, make_engine: Any, store: Path, tmp_path: Path) -> None:
        prefill = make_engine("prefill", local_disk_path=str(tmp_path / "tier"))
        prefill.send("p", PROMPT)
        prefill.step_until(lambda: len(list((tmp_path / "tier").glob("*/*.pt"))) == 5)
        prefill.submit("q", PROMPT)
        promised = prefill.lookup("q").num_tokens
        for path in store.glob("*.data"):
            path.unlink()
        prefill.admit("q", promised)
        prefill.step_until(lambda: "q" in prefill.received)
        assert prefill.received["q"] == len(PROMPT)
        prefill.close()
        assert list((tmp_path / "tier").iterdir()) == []

    def test_a_damaged_file_of_the_local_disk_tier_is_refused(
        self, make_engine: Any, store: Path, tmp_path: Path
    ) -> None:
        prefill = make_engine("prefill", local_disk_path=str(tmp_path / "tier"))
        prefill.send("p", PROMPT)
        prefill.step_until(lambda: len(list((tmp_path / "tier").glob("*/*.pt"))) == 5)
        for path in (tmp_path / "tier").glob("*/*.pt"):
            path.write_bytes(bytes(path.stat().st_size))
        assert prefill.load("q", PROMPT) == 0
        assert set(prefill.stats.failures) == {"corrupt"}  # one for each reader that takes part

    def test_a_cpu_tier_that_is_full_evicts(self, make_engine: Any) -> None:
        prompt = list(range(40 * S))
        make_engine("prefill", max_cpu_bytes=32 * 4096, cpu_cache=True).send("p", prompt)
        decode = make_engine("decode", max_cpu_bytes=32 * 4096, cpu_cache=True)
        assert decode.load("d", prompt) == len(prompt)
        decode.finish("d")
        assert decode.load("again", prompt) == len(prompt)


class TestDamage:
    @pytest.mark.parametrize(
        ("kind", "damage"),
        [
            ("missing", lambda data: data[:-1]),
            ("missing", lambda data: b""),
            ("corrupt", lambda data: bytes([data[0] ^ 1]) + data[1:]),
            ("corrupt", lambda data: data[:-1] + bytes([data[-1] ^ 0x80])),
            ("corrupt", lambda data: bytes(len(data))),
        ],
        ids=["cut", "emptied", "first bit", "last bit", "zeros"],
    )
    def test_it_is_a_miss_and_the_next_prefill_heals_it(
        self, make_engine: Any, store: Path, kind: str, damage: Any
    ) -> None:
        prefill = make_engine("prefill")
        prefill.send("p", PROMPT)
        path = find_file(prefill, store, 2)
        path.write_bytes(damage(path.read_bytes()))
        decode = make_engine("decode")
        assert decode.load("d", PROMPT) == 2 * S
        assert decode.stats.failures == {kind: 1}
        assert not path.exists()
        prefill.send("q", PROMPT)
        assert decode.load("e", PROMPT) == len(PROMPT)

    def test_another_blocks_file_is_foreign(self, make_engine: Any, store: Path) -> None:
        prefill = make_engine("prefill")
        prefill.send("p", PROMPT)
        shutil.copy(find_file(prefill, store, 1), find_file(prefill, store, 2))
        decode = make_engine("decode")
        assert decode.load("d", PROMPT) == 2 * S
        assert decode.stats.failures == {"foreign": 1}


class TestTrouble:
    def test_a_store_that_hangs_costs_a_bounded_time(self, make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        make_engine("prefill").send("p", PROMPT)
        decode = make_engine("decode", timeout_s=0.2)
        decode.submit("d", PROMPT)
        promised = decode.lookup("d").num_tokens
        gate, returned = threading.Event(), threading.Semaphore(0)
        retrieve = cache_engine.CacheEngine.retrieve

        def hang(*args: Any) -> None:
            gate.wait()
            retrieve(*args)
            returned.release()

        monkeypatch.setattr(cache_engine.CacheEngine, "retrieve", hang)
        decode.admit("d", promised)
        decode.step_until(lambda: "d" in decode.received)
        assert decode.received["d"] == 0
        assert set(decode.stats.failures) == {"timeout"}
        # The blocks are others' now; the harness watches them, and the late call must not write there.
        decode.finish("d")
        gate.set()
        assert all(returned.acquire(timeout=30) for _ in range(decode.stats.failures["timeout"]))
        decode.memory.check_free_blocks()

    def test_a_write_that_hangs_is_a_failure_and_the_next_ones_go(
        self, make_engine: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate = threading.Event()
        write = SharedFiles._write

        def write_slowly(self: SharedFiles, key: Any, memory_obj: Any) -> None:
            gate.wait()
            write(self, key, memory_obj)

        monkeypatch.setattr(SharedFiles, "_write", write_slowly)
        prefill = make_engine("prefill", timeout_s=0.2)
        assert not prefill.send("p", PROMPT)
        assert prefill.stats.failures == {"timeout": 5}
        gate.set()
        prefill.step_until(lambda: prefill.send(f"q{next(NUMBERS)}", PROMPT))

    def test_a_read_that_is_given_up_gives_its_memory_back(
        self, make_engine: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prefill = make_engine("prefill")
        prefill.send("p", PROMPT)
        gate, has_begun, is_over = threading.Event(), threading.Event(), threading.Event()
        read_run = SharedFiles._read_run

        def read_slowly(self: SharedFiles, keys: Any) -> Any:
            has_begun.set()
            gate.wait()
            values = read_run(self, keys)
            is_over.set()
            return values

        monkeypatch.setattr(SharedFiles, "_read_run", read_slowly)
        engine = prefill.worker._store._engine
        files, memory = engine._remote.connection.getWrappedConnector(), engine._cpu.memory_allocator.pin_allocator
        keys = BlockHasher(prefill.context.identity.fingerprint).block_keys(PROMPT, S)
        names = [engine._database.build_key(key.digest) for key in keys]
        reading = asyncio.run_coroutine_threadsafe(files.batched_get(names), files.loop)
        assert has_begun.wait(30)
        reading.cancel()
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), files.loop).result(30)
        gate.set()
        assert is_over.wait(30)
        prefill.step_until(lambda: memory.total_allocated_size == 0)

    def test_what_was_deleted_while_a_prompt_was_saved_is_not_offered(
        self, make_engine: Any, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        prefill = make_engine("prefill")
        count_missing = LMCacheStore.count_missing

        def delete_first(self: LMCacheStore, keys: Any) -> int:
            find_file(prefill, store, 0).unlink()
            return count_missing(self, keys)

        monkeypatch.setattr(LMCacheStore, "count_missing", delete_first)
        assert not prefill.send("p", PROMPT)
        assert prefill.stats.failures == {"evicted": 1}
        monkeypatch.undo()
        assert prefill.send("q", PROMPT)

    def test_a_directory_that_is_gone_is_a_counted_failure(self, make_engine: Any, store: Path) -> None:
        prefill = make_engine("prefill")
        prefill.send("p", PROMPT)
        away = store.rename(store.with_name("away"))
        assert not prefill.send("q", list(range(3 * S)))
        assert sum(prefill.stats.failures.values()) == 3
        away.rename(store)
        prefill.step_until(lambda: prefill.send(f"r{next(NUMBERS)}", list(range(3 * S))))

    def test_a_directory_that_cannot_be_used_is_said_at_start(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        context = build_context(Role.PREFILL, {"url": f"fs://{tmp_path}/file"})
        for build in (LMCacheConnector.build_scheduler, LMCacheConnector.build_worker):
            with pytest.raises(ConfigError, match="cannot use directory"):
                build(context)


class TestManners:
    def test_opening_changes_nothing_of_the_process(self, make_engine: Any) -> None:
        before = multiprocessing.get_start_method(allow_none=True)
        make_engine()
        assert multiprocessing.get_start_method(allow_none=True) == before
        assert gc.isenabled()

    def test_no_thread_of_lmcaches_keeps_the_process(self, make_engine: Any) -> None:
        engine = make_engine()
        engine.send("p", PROMPT)
        others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
        assert [thread.name for thread in others if not thread.daemon] == []

    @pytest.mark.skipif(sys.platform != "linux", reason="threads have no niceness of their own")
    def test_its_threads_step_back_where_nothing_is_saved(self, make_engine: Any) -> None:
        started: dict[str, set[int]] = {}
        for role in ("prefill", "decode"):
            before = set(threading.enumerate())
            engine = make_engine(role)
            engine.send("p", PROMPT) if role == "prefill" else engine.load("d", PROMPT)
            own = [thread for thread in threading.enumerate() if thread not in before]
            ids = [thread.native_id for thread in own if thread.name.startswith(("lmcache-call", "lmcache-file"))]
            started[role] = {os.getpriority(os.PRIO_PROCESS, thread_id or 0) for thread_id in ids}
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        assert started == {"prefill": {nice}, "decode": {min(nice + 10, 19)}}

    def test_closing_ends_the_threads_and_leaves_the_blocks_alone(self, make_engine: Any, store: Path) -> None:
        before = threading.active_count()
        engine = make_engine()
        engine.send("p", PROMPT)
        engine.close()
        engine.close()
        # LMCache's watch over pinned memory, one for the process, stays.
        assert threading.active_count() <= before + 1
        assert [path.suffix for path in store.iterdir()] == [".data"] * 5

    def test_closing_waits_for_a_file_that_is_being_written(
        self, make_engine: Any, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its bytes lie in memory that LMCache frees."""
        gate, order = threading.Event(), list[str]()
        write, stop, close = SharedFiles._write, SharedFiles.stop, LMCacheEngine.close

        def write_slowly(self: SharedFiles, key: Any, memory_obj: Any) -> None:
            gate.wait()
            write(self, key, memory_obj)
            order.append("written")

        def open_gate_and_stop(self: SharedFiles) -> None:
            threading.Timer(0.1, gate.set).start()
            stop(self)

        def note_close(self: LMCacheEngine) -> None:
            order.append("closed")
            close(self)

        monkeypatch.setattr(SharedFiles, "_write", write_slowly)
        engine = make_engine("prefill", timeout_s=0.2)
        assert not engine.send("p", PROMPT[:S])
        monkeypatch.setattr(SharedFiles, "stop", open_gate_and_stop)
        monkeypatch.setattr(LMCacheEngine, "close", note_close)
        engine.worker.close()
        assert order == ["written", "closed"]

    def test_lmcaches_statistics_do_not_pile_up(self, make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cache_engine, "_STATISTICS_LIFE_S", 0.0)
        prefill, decode = make_engine("prefill"), make_engine("decode")
        for i in range(20):
            prompt = list(range(i, i + 2 * S))
            prefill.send(f"p{i}", prompt)
            assert decode.load(f"d{i}", prompt) == 2 * S
        monitor = LMCStatsMonitor.GetOrCreate()
        assert len(monitor.lookup_requests) + len(monitor.retrieve_requests) <= 4
