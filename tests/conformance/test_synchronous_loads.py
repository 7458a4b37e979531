"""A connector whose loads are done when `start_load_kv` returns: the contract's other way, which none here takes.

It is the memory connector with its loads turned round. The kit holds it to the contract; between real engines some of
its loads fail, and the step that computed on unfilled blocks is done again.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pdserve.connectors.base import ConnectorContext, KVRequest, MatchResult
from pdserve.connectors.blocks.messages import LoadRequest, StepMetadata
from pdserve.connectors.memory import MemoryConnector, MemoryScheduler, MemoryWorker
from pdserve.connectors.multi import MultiConnector
from pdserve.connectors.multi.children import Child
from pdserve.connectors.testing import Bench, Level
from pdserve.connectors.testing.checks import get_checks
from pdserve.connectors.testing.engines.load import ask, build_questions, engine_pair
from pdserve.connectors.testing.patience import Patience
from pdserve.connectors.testing.runner import Verdict, run_checks
from pdserve.connectors.testing.target import ConformanceTarget
from pdserve.connectors.testing.targets import memory, multi


class SyncScheduler(MemoryScheduler):
    def get_num_new_matched_tokens(self, request: KVRequest, num_computed_tokens: int) -> MatchResult:
        return MatchResult(super().get_num_new_matched_tokens(request, num_computed_tokens).num_tokens)


class SyncWorker(MemoryWorker):
    """Tells of blocks that it could not fill; asked for, of every third load all but the first."""

    def __init__(self, context: ConnectorContext, store: dict[bytes, bytes], *, fails: bool) -> None:
        super().__init__(context, store)
        self._fails = fails
        self._num_loads = 0

    def start_load_kv(self, metadata: StepMetadata) -> None:
        lost = {load.request_id for load in metadata.loads if not self._fill(load)}
        saves = [save for save in metadata.saves if save.request_id not in lost]
        super().start_load_kv(StepMetadata(loads=[], saves=saves))

    def _fill(self, load: LoadRequest) -> bool:
        self._num_loads += 1
        for index, block in enumerate(load.blocks):
            is_lost = self._fails and self._num_loads % 3 == 0 and index > 0
            failure = "missing" if is_lost else self._load(block)
            if failure is not None:
                self._report.stats.count_failure(failure)
                self._report.invalid_block_ids.update(bad.block_id for bad in load.blocks[index:])
                return False
        return True


class SyncConnector(MemoryConnector):
    fails: ClassVar[bool] = False

    @classmethod
    def build_scheduler(cls, context: ConnectorContext) -> SyncScheduler:
        return SyncScheduler(context, context.options["store"])

    @classmethod
    def build_worker(cls, context: ConnectorContext) -> SyncWorker:
        return SyncWorker(context, context.options["store"], fails=cls.fails)


class FailingSyncConnector(SyncConnector):
    fails: ClassVar[bool] = True


def test_the_kit_passes_it(tmp_path: Path) -> None:
    target = memory.Target(SyncConnector, {}, tmp_path)
    results = run_checks(target, get_checks(max_level=Level.CONTRACT), patience=Patience(5.0))
    assert [result.reason for result in results if result.verdict is Verdict.FAIL] == []


class Composition(multi.Target):
    """Each child with a store of its own, in this process."""

    def _open_part(self, child: Child) -> ConformanceTarget:
        return memory.Target(child.connector, child.options, self.directory)


def test_the_kit_passes_a_composition_of_both_ways(tmp_path: Path) -> None:
    children = [{"connector": kind} for kind in (f"{__name__}:SyncConnector", "memory")]
    target = Composition(MultiConnector, {"children": children}, tmp_path)
    checks = [check for check in get_checks(max_level=Level.CONTRACT) if check.rule in ("R1", "R2", "R4", "R8", "R17")]
    results = run_checks(target, checks, patience=Patience(5.0))
    assert [result.reason for result in results if result.verdict is Verdict.FAIL] == []
    assert {"R1", "R2", "R4", "R8", "R17"} == {r.check.rule for r in results if r.verdict is Verdict.PASS}


@pytest.mark.parametrize("settings", [{}, {"decode": {"max_num_batched_tokens": 20}}, {"decode": {"num_blocks": 22}}])
def test_what_is_computed_on_unfilled_blocks_is_computed_again(tmp_path: Path, settings: Mapping[str, Any]) -> None:
    bench = Bench(memory.Target(FailingSyncConnector, {}, tmp_path), "R4", Patience())
    model, questions = build_questions(bench)
    with engine_pair(bench, model, **settings) as pair:
        answers = ask(bench, pair, questions)
        pair.settle(20.0)
    num_computed = [len(q.prompt) - a.num_cached_tokens for q, a in zip(questions, answers, strict=True)]
    assert any(num_computed)
    assert not all(num_computed)
