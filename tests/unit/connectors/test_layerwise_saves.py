"""Saving layer by layer: what is on the way when, what is dropped, and that nothing depends on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pdserve.connectors.base import ChoosesLayerSteps
from pdserve.connectors.blocks import drafts
from pdserve.connectors.blocks.block_format import HEADER_BYTES, BlockFormat
from pdserve.connectors.blocks.block_memory import BlockMemory
from pdserve.connectors.blocks.drafts import StepDrafts
from pdserve.connectors.blocks.messages import BlockTransfer
from pdserve.connectors.blocks.staging import StagingPool
from pdserve.connectors.blocks.task_threads import TaskThreads
from pdserve.connectors.shared_storage import file_draft
from pdserve.connectors.shared_storage.file_draft import FileDraft
from pdserve.connectors.testing import EngineHarness
from pdserve.connectors.testing.kv_content import TINY_SPEC
from pdserve.kv_layout import BlockKey, KVCacheSpec

S = TINY_SPEC.block_size
LAYER_BYTES = TINY_SPEC.block_bytes // TINY_SPEC.num_layers
PROMPT = list(range(100, 100 + 3 * S + 1))
NUM_BLOCKS = 4


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def list_temps(store: Path) -> list[Path]:
    return list((store / "tmp").glob("*"))


def count_published(store: Path) -> int:
    return len(list(store.glob("?/?/*.kv")))


class Step:
    """A prompt's only step, call by call."""

    def __init__(self, engine: EngineHarness, request_id: str = "p") -> None:
        self.engine = engine
        self.live = engine._live.get(request_id)
        if self.live is None:
            engine.submit(request_id, PROMPT)
            self.block_ids = engine.admit(request_id, 0)
        engine.worker.start_load_kv(engine.build_metadata({request_id: len(PROMPT)}))

    def compute(self, layer: int) -> None:
        self.engine.memory.fill(self.block_ids, PROMPT, range(len(PROMPT)), "", layer)
        self.engine.worker.save_kv_layer(layer)


@pytest.fixture
def producer(make_engine) -> EngineHarness:
    engine: EngineHarness = make_engine("prefill", layerwise=True)
    return engine


@pytest.fixture
def slow_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is written before the event."""
    gate = threading.Event()
    write_all = file_draft.write_all

    def wait_and_write(fd: int, data: memoryview, offset: int) -> None:
        gate.wait(30)
        write_all(fd, data, offset)

    monkeypatch.setattr(file_draft, "write_all", wait_and_write)
    yield gate
    gate.set()


def test_the_first_layer_is_written_before_the_last_is_computed(producer, make_engine, store: Path) -> None:
    step = Step(producer)
    step.compute(0)
    wait_until(lambda: [p.stat().st_size for p in list_temps(store)] == [HEADER_BYTES + LAYER_BYTES] * NUM_BLOCKS)
    assert count_published(store) == 0
    step.compute(1)
    assert count_published(store) == 0  # the forward pass has not ended well yet
    producer.worker.wait_for_save()
    wait_until(lambda: count_published(store) == NUM_BLOCKS)
    assert list_temps(store) == []
    assert make_engine("decode").load("d", PROMPT) == len(PROMPT)


def test_the_engines_blocks_are_free_while_writes_are_under_way(
    producer, make_engine, store: Path, slow_writes: threading.Event
) -> None:
    step = Step(producer)
    step.compute(0)
    step.compute(1)
    producer.worker.wait_for_save()
    producer.memory.kv_cache.fill_(7.0)
    slow_writes.set()
    wait_until(lambda: count_published(store) == NUM_BLOCKS)
    assert make_engine("decode").load("d", PROMPT) == len(PROMPT)


def test_layers_of_a_forward_pass_that_failed_leave_nothing(producer, store: Path) -> None:
    num_free = producer.worker._staging.num_free
    step = Step(producer)
    step.compute(0)
    wait_until(lambda: len(list_temps(store)) == NUM_BLOCKS)
    producer.step()
    wait_until(lambda: list_temps(store) == [])
    wait_until(lambda: producer.worker._staging.num_free == num_free)
    assert count_published(store) == 0


def test_a_prompt_is_saved_after_its_forward_pass_failed_once(producer, make_engine, store: Path) -> None:
    step = Step(producer)
    step.compute(0)
    producer.step()
    producer.finish("p")
    assert producer.send("again", PROMPT)
    assert (list_temps(store), producer.stats.failures) == ([], {})
    assert make_engine("decode").load("d", PROMPT) == len(PROMPT)


@pytest.mark.parametrize("fails_at", range(1, 4))
def test_a_draft_that_fails_is_written_like_any_block(
    producer, make_engine, store: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    """First layer, last layer, header."""
    num_writes: dict[int, int] = {}
    write_all = file_draft.write_all

    def fail_once(fd: int, data: memoryview, offset: int) -> None:
        num_writes[fd] = num_writes.get(fd, 0) + 1
        if num_writes[fd] == fails_at:
            raise OSError(5, "broken")
        write_all(fd, data, offset)

    monkeypatch.setattr(file_draft, "write_all", fail_once)
    step = Step(producer)
    step.compute(0)
    wait_until(lambda: sum(num_writes.values()) == NUM_BLOCKS)
    step.compute(1)
    producer.worker.wait_for_save()
    wait_until(lambda: count_published(store) == NUM_BLOCKS)
    assert list_temps(store) == []
    assert max(num_writes.values()) >= fails_at
    decode = make_engine("decode")
    assert decode.load("d", PROMPT) == len(PROMPT)
    assert decode.stats.failures == {}


def test_what_finds_no_room_is_saved_after_the_forward_pass(make_engine, store: Path) -> None:
    value_bytes = HEADER_BYTES + TINY_SPEC.block_bytes
    producer = make_engine("prefill", layerwise=True, max_staging_bytes=2 * value_bytes)
    assert producer.send("p", PROMPT)
    assert (count_published(store), producer.stats.failures) == (NUM_BLOCKS, {})
    assert make_engine("decode").load("d", PROMPT) == len(PROMPT)


def test_drafts_leave_staging_memory_to_others(make_engine, store: Path) -> None:
    value_bytes = HEADER_BYTES + TINY_SPEC.block_bytes
    producer = make_engine("prefill", layerwise=True, max_staging_bytes=5 * value_bytes, save_timeout_s=0)
    Step(producer)
    assert producer.worker._staging.num_free == 3


def test_so_many_drafts_and_no_more(make_engine, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "_MAX_DRAFTS", 3)
    producer = make_engine("prefill", layerwise=True)
    step = Step(producer)
    step.compute(0)
    wait_until(lambda: len(list_temps(store)) == 3)
    step.compute(1)
    producer.worker.wait_for_save()
    wait_until(lambda: count_published(store) == NUM_BLOCKS)


def test_layers_are_wanted_only_where_something_is_saved(producer) -> None:
    worker = producer.worker
    assert isinstance(worker, ChoosesLayerSteps)
    assert not worker.wants_layers()
    step = Step(producer)
    assert worker.wants_layers()
    step.compute(0)
    step.compute(1)
    worker.wait_for_save()
    assert not worker.wants_layers()
    producer.finish("p")
    producer.step()
    wait_until(lambda: not worker._saver._writing)
    Step(producer, "stored")  # every block is there already
    assert not worker.wants_layers()


def test_whole_blocks_want_no_layers(make_engine, store: Path) -> None:
    engine = make_engine("prefill", layerwise=False)
    Step(engine)
    assert not engine.worker.wants_layers()
    assert list_temps(store) == []


def test_closing_in_the_middle_of_a_step_leaves_no_file(producer, store: Path) -> None:
    step = Step(producer)
    step.compute(0)
    wait_until(lambda: len(list_temps(store)) == NUM_BLOCKS)
    producer.worker.close()
    producer.worker.close()
    assert (list_temps(store), count_published(store)) == ([], 0)


def test_closing_before_the_last_pieces_are_written_leaves_no_file(
    producer, store: Path, slow_writes: threading.Event
) -> None:
    step = Step(producer)
    step.compute(0)
    step.compute(1)
    producer.worker.wait_for_save()
    wait_until(lambda: len(list_temps(store)) > 0)
    threading.Timer(0.05, slow_writes.set).start()
    producer.worker.close()
    assert list_temps(store) == []


def test_writers_side_by_side_write_a_block_once_and_in_order(make_engine, store: Path) -> None:
    producer = make_engine("prefill", layerwise=True, writer_threads=8)
    for start in range(0, 60 * S, 10 * S):
        assert producer.send(f"p{start}", list(range(start, start + 10 * S + 1)))
    assert list_temps(store) == []
    decode = make_engine("decode")
    for start in range(0, 60 * S, 10 * S):
        assert decode.load(f"d{start}", list(range(start, start + 10 * S + 1))) == 10 * S + 1
        decode.finish(f"d{start}")


# --- the parts ------------------------------------------------------------------------------------------------


def test_layers_copied_one_by_one_are_the_block() -> None:
    generator = torch.Generator().manual_seed(1)
    kv_cache = torch.rand((3, *TINY_SPEC.block_shape), generator=generator).to(torch.bfloat16)
    memory = BlockMemory(kv_cache, TINY_SPEC, "mine")
    for num_tokens in (1, S - 1, S):
        whole, parts = (np.full(TINY_SPEC.block_bytes, 9, dtype=np.uint8) for _ in range(2))
        memory.copy_out(2, num_tokens, whole.data)
        for layer in range(TINY_SPEC.num_layers):
            memory.copy_layers_out(2, num_tokens, layer, layer + 1, parts.data)
        assert whole.tobytes() == parts.tobytes()


@pytest.mark.parametrize(("num_layers", "ends"), [(1, [1]), (4, [1, 2, 3, 4]), (30, [10, 20, 29, 30])])
def test_a_block_goes_in_at_most_four_pieces_the_last_layer_alone(num_layers: int, ends: list[int]) -> None:
    spec = KVCacheSpec(num_layers=num_layers, num_kv_heads=1, head_dim=2, block_size=4, dtype="bfloat16")
    memory = BlockMemory(torch.ones((1, *spec.block_shape), dtype=torch.bfloat16), spec, "mine")
    pieces: list[int] = []

    class Draft:
        def append(self, piece: memoryview) -> None:
            pieces.append(len(piece))

        def publish(self) -> bool:
            return True

        def abandon(self) -> None:
            raise AssertionError

    class Store:
        def begin_draft(self, key: BlockKey) -> Draft:
            return Draft()

    threads = TaskThreads("kv-test", 1)
    staging = StagingPool(2, HEADER_BYTES + spec.block_bytes, time.monotonic)
    step = StepDrafts(Store(), spec, staging, threads)
    step.begin([BlockTransfer(b"d" * 16, 4, 0)], memory)
    for layer in range(num_layers):
        before = len(pieces)
        step.save_layer(layer)
        if layer + 1 in ends[:-1]:
            wait_until(lambda before=before: len(pieces) > before)  # type: ignore[misc]
    block = step.take(b"d" * 16)
    assert block is not None
    assert block.publish()
    layer_bytes = spec.block_bytes // num_layers
    assert np.cumsum(pieces).tolist() == [end * layer_bytes for end in ends]
    assert threads.close(30)


def test_a_draft_without_its_directory_is_published_as_little_as_it_is_written(tmp_path: Path, make_engine) -> None:
    engine = make_engine("prefill", layerwise=True)
    store = engine.worker._store
    context = engine.context
    Path(context.options["path"]).rmdir()
    draft = store.begin_draft(BlockKey(b"k" * 16, S))
    assert isinstance(draft, FileDraft)
    draft.append(memoryview(bytes(TINY_SPEC.block_bytes)))
    assert not draft.publish()
    draft.abandon()


def test_a_checksum_in_pieces_is_the_checksum(make_engine) -> None:
    engine = make_engine("prefill")
    block_format = BlockFormat(engine.context.identity, TINY_SPEC)
    key = BlockKey(b"k" * 16, S)
    value = bytearray(HEADER_BYTES) + bytes(range(256)) * (TINY_SPEC.block_bytes // 256)
    block_format.seal(key, memoryview(value))
    checksum = block_format.start_checksum(key)
    for start in range(HEADER_BYTES, len(value), 100):
        checksum.update(memoryview(value)[start : start + 100])
    assert block_format.build_header(key, checksum) == bytes(value[:HEADER_BYTES])
