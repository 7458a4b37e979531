"""A store's halves say when an engine that waits has something new to hear, once it can be heard."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from pdserve.connectors.base import ConnectorOutput, KVRequest, ScheduledTokens, StepPlan
from pdserve.connectors.shared_storage import SharedStorageConnector
from pdserve.connectors.testing import build_context
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.kv_layout import BlockHasher
from pdserve.protocol import Role

PROMPT = list(range(3 * TINY_SPEC.block_size))
BLOCK_IDS = [0, 1, 2]


def test_ends_of_sendings_and_of_loads_wake_the_engine(tmp_path: Path) -> None:
    context = build_context(Role.PREFILL, {"path": str(tmp_path)})
    scheduler = SharedStorageConnector.build_scheduler(context)
    worker = SharedStorageConnector.build_worker(context)
    worker.register_kv_caches(torch.zeros((3, *TINY_SPEC.block_shape), dtype=torch.bfloat16), TINY_SPEC)
    reports: list[ConnectorOutput] = []
    is_awake = threading.Event()

    def wake() -> None:
        reports.append(worker.get_finished(()))  # an end that wakes is there to be heard
        is_awake.set()

    def step(plan: StepPlan, ended: list[str]) -> None:
        worker.start_load_kv(scheduler.build_connector_metadata(plan))
        worker.wait_for_save()
        reports.append(worker.get_finished(ended))

    worker.set_wake_up(wake)
    keys = tuple(BlockHasher(context.identity.fingerprint).block_keys(PROMPT, TINY_SPEC.block_size))
    request = KVRequest("r", len(PROMPT), keys)
    step(StepPlan([ScheduledTokens(request, BLOCK_IDS, 0, len(PROMPT))]), [])
    scheduler.request_finished(request, BLOCK_IDS, len(PROMPT), handoff=True)
    step(StepPlan([]), ["r"])
    if not any(report.finished_sending for report in reports):
        assert is_awake.wait(30)
    assert [report.finished_sending for report in reports if report.finished_sending] == [{"r"}]

    is_awake.clear()
    again = KVRequest("again", len(PROMPT), keys)
    scheduler.update_state_after_alloc(again, BLOCK_IDS, 0, len(PROMPT))
    step(StepPlan([]), [])
    assert is_awake.wait(30)
    assert [report.finished_receiving for report in reports if report.finished_receiving] == [{"again"}]
    worker.close()
    scheduler.close()
