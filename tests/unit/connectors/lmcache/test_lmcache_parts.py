"""Calls that hang, retrievals that are given up, directories of engines that died."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("lmcache.v1.cache_engine", reason="lmcache is not installed here: make test-lmcache runs these")

from pdserve.connectors.blocks.block_format import HEADER_BYTES, BlockFormat
from pdserve.connectors.blocks.block_memory import BlockMemory
from pdserve.connectors.blocks.messages import BlockTransfer
from pdserve.connectors.lmcache.deadline_calls import CallFailedError, DeadlineCalls
from pdserve.connectors.lmcache.directories import EngineDirectories
from pdserve.connectors.lmcache.lmcache_parts import DigestDatabase
from pdserve.connectors.lmcache.options import parse_options
from pdserve.connectors.lmcache.retrieval import Retrieval
from pdserve.connectors.testing import build_context
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.errors import ConfigError
from pdserve.kv_layout import BlockHasher, BlockKey, Rank
from pdserve.protocol import Role

CONTEXT = build_context(Role.PREFILL, {})
FORMAT = BlockFormat(CONTEXT.identity, CONTEXT.spec)


@pytest.fixture
def calls() -> DeadlineCalls:
    return DeadlineCalls("test", 2)


class TestDeadlineCalls:
    def test_a_result_is_returned(self, calls: DeadlineCalls) -> None:
        assert calls.run(lambda: 7, 10) == 7
        assert calls.run(lambda: None, 10) is None

    def test_what_raises_is_a_failure_and_logged(self, calls: DeadlineCalls, caplog: pytest.LogCaptureFixture) -> None:
        with pytest.raises(CallFailedError) as caught:
            calls.run(lambda: 1 // 0, 10)
        assert caught.value.failure.kind == "io"
        calls.close_after(lambda: None, 10)
        assert "ZeroDivisionError" in caplog.text

    def test_what_hangs_is_left_behind_and_the_others_go_on(self, calls: DeadlineCalls) -> None:
        gate = threading.Event()
        with pytest.raises(CallFailedError) as caught:
            calls.run(gate.wait, 0.01)
        assert caught.value.failure.kind == "timeout"
        assert calls.run(lambda: 7, 10) == 7
        gate.set()

    def test_when_all_hang_nothing_is_queued(self, calls: DeadlineCalls) -> None:
        gate = threading.Event()
        made: list[int] = []
        for _ in range(2):
            with pytest.raises(CallFailedError):
                calls.run(gate.wait, 0.01)
        for _ in range(3):
            with pytest.raises(CallFailedError):
                calls.run(lambda: made.append(1), 0.01)
        gate.set()
        assert calls.run(lambda: 7, 10) == 7
        assert made == []

    def test_its_threads_do_not_keep_the_process(self, calls: DeadlineCalls) -> None:
        assert calls.run(lambda: threading.current_thread().daemon, 10)

    def test_a_last_call_that_hangs_is_told(self, calls: DeadlineCalls, caplog: pytest.LogCaptureFixture) -> None:
        gate = threading.Event()
        calls.close_after(gate.wait, 0.01)
        gate.set()
        assert "LMCache was not closed" in caplog.text


class TestRetrieval:
    def setup_method(self) -> None:
        self.cache = torch.zeros((4, *TINY_SPEC.block_shape), dtype=torch.bfloat16)
        self.memory = BlockMemory(self.cache, TINY_SPEC, "test")
        self.block = BlockTransfer(b"k" * 16, TINY_SPEC.block_size, 2)
        self.retrieval = Retrieval([self.block], self.memory, FORMAT)

    def seal(self, key: BlockKey, fill: int = 7) -> memoryview:
        value = np.full(FORMAT.value_bytes, fill, dtype=np.uint8)
        FORMAT.seal(key, value.data)
        return value.data

    def test_a_sound_value_lands_in_its_block(self) -> None:
        self.retrieval.put(0, self.seal(self.block.key))
        assert self.retrieval.get_outcomes() == [None]
        assert bytes(self.memory.get_view(2)) == b"\7" * TINY_SPEC.block_bytes
        assert not any(self.memory.get_view(1))

    def test_what_never_came_is_missing(self) -> None:
        assert [outcome and outcome.kind for outcome in self.retrieval.get_outcomes()] == ["missing"]

    @pytest.mark.parametrize(
        ("kind", "at"), [("corrupt", 0), ("foreign", 20), ("corrupt", 75), ("corrupt", HEADER_BYTES), ("corrupt", -1)]
    )
    def test_a_damaged_value_does_not_touch_the_block(self, kind: str, at: int) -> None:
        value = self.seal(self.block.key)
        value[at] ^= 1
        self.retrieval.put(0, value)
        assert [outcome and outcome.kind for outcome in self.retrieval.get_outcomes()] == [kind]
        assert not any(self.memory.get_view(2))

    @pytest.mark.parametrize("length", [0, 10, HEADER_BYTES, FORMAT.value_bytes - 1])
    def test_a_short_value_is_truncated(self, length: int) -> None:
        self.retrieval.put(0, self.seal(self.block.key)[:length])
        assert [outcome and outcome.kind for outcome in self.retrieval.get_outcomes()] == ["truncated"]

    def test_another_blocks_value_is_foreign(self) -> None:
        self.retrieval.put(0, self.seal(BlockKey(b"o" * 16, TINY_SPEC.block_size)))
        assert [outcome and outcome.kind for outcome in self.retrieval.get_outcomes()] == ["foreign"]

    def test_nothing_is_written_once_it_is_given_up(self) -> None:
        self.retrieval.abandon()
        self.retrieval.put(0, self.seal(self.block.key))
        assert not any(self.memory.get_view(2))


@pytest.mark.parametrize(("rank", "worker"), [(Rank(), "1@0"), (Rank(2, 3), "3@2"), (Rank(1, 2, 1, 2), "4@3")])
def test_keys_carry_model_rank_and_digest_and_nothing_of_lmcaches_hashing(rank: Rank, worker: str) -> None:
    hasher = BlockHasher(CONTEXT.identity.fingerprint)
    keys = hasher.block_keys(list(range(9)), TINY_SPEC.block_size)
    database = DigestDatabase(f"pdserve-{CONTEXT.identity.fingerprint}", rank)
    found = list(database.process_tokens(tokens=[int.from_bytes(key.digest) for key in keys], mask=None))
    assert [(start, end) for start, end, _ in found] == [(0, 1), (1, 2), (2, 3)]
    assert [key for _, _, key in found] == [database.build_key(key.digest) for key in keys]
    assert [key.to_string() for _, _, key in found] == [
        f"pdserve-{CONTEXT.identity.fingerprint}@{worker}@{int(key.hex, 16):x}@uint8" for key in keys
    ]


class TestDirectories:
    def make(self, tmp_path: Path, *, can_write: bool = True, disk: bool = False) -> EngineDirectories:
        options = {"url": f"fs://{tmp_path}/store"}
        if disk:
            options["local_disk_path"] = str(tmp_path / "tier")
        return EngineDirectories(parse_options(build_context(Role.PREFILL, options)), can_write=can_write)

    def test_two_engines_share_no_temporary_directory(self, tmp_path: Path) -> None:
        a, b = self.make(tmp_path), self.make(tmp_path)
        assert a.temp is not None
        assert b.temp is not None
        assert a.temp != b.temp
        a.remove()
        assert (a.temp.exists(), b.temp.exists()) == (False, True)

    def test_lookups_leave_nothing(self, tmp_path: Path) -> None:
        assert self.make(tmp_path, can_write=False).temp is None
        assert list((tmp_path / "store").iterdir()) == []

    def test_unfinished_files_of_the_dead_go_when_they_are_old(self, tmp_path: Path) -> None:
        dead, others = tmp_path / "store" / "pdserve-tmp-dead", tmp_path / "store" / "tmp-others"
        paths = old, _, foreign = dead / "old", dead / "young", others / "old"
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x")
        for path in (old, foreign):
            os.utime(path, (1, 1))
        self.make(tmp_path)
        assert [path.exists() for path in paths] == [False, True, True]

    def test_a_dead_engines_tier_goes_and_a_living_ones_stays(self, tmp_path: Path) -> None:
        tier = tmp_path / "tier"
        dead, alive, other = tier / "pdserve-999999999-ab", tier / f"pdserve-{os.getpid()}-ab", tier / "mine"
        for path in (dead, alive, other):
            path.mkdir(parents=True)
        directories = self.make(tmp_path, disk=True)
        assert (dead.exists(), alive.exists(), other.exists()) == (False, True, True)
        assert directories.disk is not None
        directories.remove()
        assert not directories.disk.exists()

    def test_a_directory_that_cannot_be_made_is_said(self, tmp_path: Path) -> None:
        (tmp_path / "store").write_text("a file")
        with pytest.raises(ConfigError, match="cannot use directory"):
            self.make(tmp_path)
