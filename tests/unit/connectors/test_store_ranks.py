"""Ranks and files: each rank's share of a block is a file of its own, which no other rank and no other engine reads."""

from __future__ import annotations

import dataclasses
import shutil
import time
from pathlib import Path

import msgspec
import pytest
import torch

from pdserve.connectors.base import ConnectorContext, ConnectorOutput, KVRequest, ScheduledTokens, StepPlan
from pdserve.connectors.blocks.worker import StoreWorker
from pdserve.connectors.shared_storage import SharedStorageConnector
from pdserve.connectors.shared_storage.capacity import CapacityKeeper
from pdserve.connectors.shared_storage.directory import BlockDirectory
from pdserve.connectors.testing import build_context
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.kv_layout import BlockHasher, Rank
from pdserve.protocol import Role

PROMPT = list(range(3 * TINY_SPEC.block_size))
BLOCK_IDS = [2, 0, 1]
WHOLE = msgspec.structs.replace(TINY_SPEC, num_kv_heads=4, num_layers=4)


class RankedEngine:
    """All ranks of one engine in this process, stepped by hand: one scheduler half, a worker half for each rank."""

    def __init__(self, store: Path, role: Role, *, tensor: int = 1, pipeline: int = 1, content: int = 0) -> None:
        base = build_context(role, {"path": str(store), "save": "always"}, spec=WHOLE)
        identity = msgspec.structs.replace(base.identity, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
        share = msgspec.structs.replace(WHOLE, num_kv_heads=4 // tensor, num_layers=4 // pipeline)
        self.contexts: list[ConnectorContext] = [
            dataclasses.replace(base, identity=identity, spec=share, rank=rank)
            for rank in Rank(0, tensor, 0, pipeline).all_ranks
        ]
        self.scheduler = SharedStorageConnector.build_scheduler(self.contexts[0])
        self.workers: list[StoreWorker] = []
        self.caches: list[torch.Tensor] = []
        for context in self.contexts:
            cache = torch.zeros((4, *share.block_shape), dtype=torch.bfloat16)
            if content:
                cache.fill_(content + context.rank.index)
            worker = SharedStorageConnector.build_worker(context)
            worker.register_kv_caches(cache, share)
            self.workers.append(worker)
            self.caches.append(cache)
        keys = BlockHasher(identity.fingerprint).block_keys(PROMPT, TINY_SPEC.block_size)
        self.request = KVRequest("r", len(PROMPT), tuple(keys))

    def save(self) -> None:
        plan = StepPlan([ScheduledTokens(self.request, BLOCK_IDS, 0, len(PROMPT))])
        self._step(plan)
        self.scheduler.request_finished(self.request, BLOCK_IDS, len(PROMPT), handoff=True)
        for worker in self.workers:
            ended = worker.get_finished(["r"])
            while not ended.finished_sending:
                ended = _look_again(worker)
            assert not ended.failed_sending

    def count_stored(self) -> int | None:
        return self.scheduler.get_num_new_matched_tokens(self.request, 0).num_tokens

    def load(self) -> list[ConnectorOutput]:
        self.scheduler.update_state_after_alloc(self.request, BLOCK_IDS, 0, len(PROMPT))
        self._step(StepPlan([]))
        reports = []
        for worker in self.workers:
            report = worker.get_finished(())
            while not report.finished_receiving and not report.failed_receiving:
                report = _look_again(worker)
            reports.append(report)
        return reports

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()

    def _step(self, plan: StepPlan) -> None:
        metadata = self.scheduler.build_connector_metadata(plan)
        for worker in self.workers:
            worker.start_load_kv(metadata)
            worker.wait_for_save()


def _look_again(worker: StoreWorker) -> ConnectorOutput:
    time.sleep(0.001)
    return worker.get_finished(())


@pytest.fixture
def make_engine(tmp_path: Path):
    engines: list[RankedEngine] = []

    def make(role: Role, *, tensor: int = 1, pipeline: int = 1, content: int = 0) -> RankedEngine:
        engines.append(RankedEngine(tmp_path / "store", role, tensor=tensor, pipeline=pipeline, content=content))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_each_rank_gets_its_own_share(make_engine, tensor: int, pipeline: int) -> None:
    make_engine(Role.PREFILL, tensor=tensor, pipeline=pipeline, content=10).save()
    decode = make_engine(Role.DECODE, tensor=tensor, pipeline=pipeline)
    assert decode.count_stored() == len(PROMPT)
    for report in decode.load():
        assert report.finished_receiving == {"r"}
    for index, cache in enumerate(decode.caches):
        assert cache[:3].unique().tolist() == [10.0 + index]


def test_what_one_rank_lacks_is_not_promised(make_engine, tmp_path: Path) -> None:
    make_engine(Role.PREFILL, tensor=2, content=10).save()
    decode = make_engine(Role.DECODE, tensor=2)
    name = decode.request.block_keys[1].hex
    (lost,) = tmp_path.glob(f"store/?/?/{name}.tp1of2-pp0of1.kv")
    lost.unlink()
    assert decode.count_stored() == TINY_SPEC.block_size
    reports = decode.load()
    assert reports[0].finished_receiving == {"r"}
    assert reports[1].failed_receiving == {"r": TINY_SPEC.block_size}


def test_another_ranks_share_under_ones_own_name_is_foreign(make_engine, tmp_path: Path) -> None:
    make_engine(Role.PREFILL, tensor=2, content=10).save()
    decode = make_engine(Role.DECODE, tensor=2)
    for theirs in tmp_path.glob("store/?/?/*.tp0of2-pp0of1.kv"):
        shutil.copy(theirs, str(theirs).replace("tp0of2", "tp1of2"))
    first, second = decode.load()
    assert first.finished_receiving == {"r"}
    assert second.failed_receiving == {"r": 0}
    assert set(second.stats.failures) == {"foreign"}
    assert decode.caches[1].count_nonzero() == 0


@pytest.mark.parametrize("saved", [(1, 1), (2, 1), (4, 1), (1, 2)])
@pytest.mark.parametrize("wanted", [(1, 1), (2, 1), (4, 1), (1, 2)])
def test_engines_of_other_sizes_do_not_meet(make_engine, saved: tuple[int, int], wanted: tuple[int, int]) -> None:
    make_engine(Role.PREFILL, tensor=saved[0], pipeline=saved[1], content=10).save()
    decode = make_engine(Role.DECODE, tensor=wanted[0], pipeline=wanted[1])
    assert decode.count_stored() == (len(PROMPT) if saved == wanted else 0)


def test_an_only_ranks_files_have_plain_names(make_engine, tmp_path: Path) -> None:
    engine = make_engine(Role.PREFILL, content=10)
    engine.save()
    assert {path.name for path in tmp_path.glob("store/?/?/*")} == {
        f"{key.hex}.kv" for key in engine.request.block_keys
    }


def test_what_a_rank_promises_it_evicts_of_no_rank(tmp_path: Path) -> None:
    """Ranks of one engine save and promise the same blocks at the same time."""
    promised, wanted = BlockHasher("00" * 16).block_keys(PROMPT[:8], 4)
    for rank in Rank(0, 2).all_ranks:
        directory = BlockDirectory(tmp_path, 8, rank=rank)
        directory.publish_file(directory.create_file(promised))
    for path in tmp_path.glob("?/?/*"):
        path.write_bytes(bytes(8))
    capacity = CapacityKeeper(directory, max_bytes=16, min_age_s=0.0)
    capacity.promise([promised])
    with pytest.raises(OSError, match="promised to a hand-off"):
        capacity.open_file(wanted)
    capacity.release([promised])
    capacity.discard_file(capacity.open_file(wanted))
