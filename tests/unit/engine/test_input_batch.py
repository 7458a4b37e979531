"""The runner's arrays give the inputs that lists would give, whatever came and went before."""

from __future__ import annotations

import random

import numpy as np
import torch

from pdserve.engine.input_batch import InputBatch
from pdserve.engine.scheduler_output import NewRequest, ScheduledRequest
from pdserve.kernels.base import AttentionMetadata
from pdserve.protocol import SamplingParams

BLOCK_SIZE = 4


def new_request(request_id: str, token_ids: list[int], block_ids: list[int]) -> NewRequest:
    return NewRequest(request_id, tuple(token_ids), len(token_ids), tuple(block_ids), SamplingParams(), False)


def require_equal(batch: InputBatch, items: list[ScheduledRequest], tokens: list[list[int]], blocks: list[list[int]]):
    inputs = batch.build_inputs(items)
    starts = [item.num_computed_tokens for item in items]
    ends = [item.num_computed_tokens + item.num_scheduled_tokens for item in items]
    expected = AttentionMetadata.build([item.num_scheduled_tokens for item in items], ends, blocks, BLOCK_SIZE)
    packed = [id_ for ids, start, end in zip(tokens, starts, ends, strict=True) for id_ in ids[start:end]]
    assert inputs.token_ids.dtype == torch.int64
    assert inputs.token_ids.tolist() == packed
    assert inputs.metadata.query_start_loc == expected.query_start_loc
    assert inputs.metadata.seq_lens == expected.seq_lens
    assert torch.equal(inputs.metadata.positions, expected.positions)
    assert torch.equal(inputs.metadata.slot_mapping, expected.slot_mapping)
    for row, (ids, end) in enumerate(zip(blocks, ends, strict=True)):
        count = -(-end // BLOCK_SIZE)
        assert inputs.metadata.block_table[row, :count].tolist() == ids[:count]
    complete = [i for i, (ids, end) in enumerate(zip(tokens, ends, strict=True)) if end == len(ids)]
    assert inputs.sampling_indices == complete
    assert inputs.last_rows.tolist() == [expected.query_start_loc[i + 1] - 1 for i in complete]


def test_a_mixed_step_holds_chunks_and_last_tokens() -> None:
    batch = InputBatch(max_num_seqs=4, max_model_len=32, block_size=BLOCK_SIZE)
    tokens = [[1, 2, 3, 4, 5], [6, 7, 8], list(range(20, 30))]
    blocks = [[9, 4], [2], [5, 6, 7]]
    for i in range(3):
        batch.add(new_request(f"r{i}", tokens[i], blocks[i]))
    items = [ScheduledRequest("r2", 4, 3), ScheduledRequest("r0", 4, 1), ScheduledRequest("r1", 0, 3)]
    order = [2, 0, 1]
    require_equal(batch, items, [tokens[i] for i in order], [blocks[i] for i in order])
    assert batch.get_token_ids("r1").tolist() == [6, 7, 8]


def test_rows_are_used_again_without_a_trace_of_who_had_them() -> None:
    rng = random.Random(3)
    batch = InputBatch(max_num_seqs=5, max_model_len=40, block_size=BLOCK_SIZE)
    tokens: dict[str, list[int]] = {}
    blocks: dict[str, list[int]] = {}
    for step in range(300):
        if len(tokens) < 5 and (not tokens or rng.random() < 0.4):
            request_id = f"r{step}"
            tokens[request_id] = [rng.randrange(1000) for _ in range(rng.randrange(1, 20))]
            blocks[request_id] = [rng.randrange(50) for _ in range(-(-len(tokens[request_id]) // BLOCK_SIZE))]
            batch.add(new_request(request_id, tokens[request_id], blocks[request_id]))
        elif rng.random() < 0.2:
            gone = rng.choice(list(tokens))
            batch.drop(gone)
            del tokens[gone], blocks[gone]
            continue
        order = rng.sample(list(tokens), rng.randrange(1, len(tokens) + 1))
        items = []
        for request_id in order:
            end = rng.choice([len(tokens[request_id]), rng.randrange(1, len(tokens[request_id]) + 1)])
            start = rng.randrange(end)
            items.append(ScheduledRequest(request_id, start, end - start))
        require_equal(batch, items, [tokens[key] for key in order], [blocks[key] for key in order])
        growing = [key for key in order if len(tokens[key]) < 40]
        for request_id in growing:
            tokens[request_id].append(rng.randrange(1000))
            if len(tokens[request_id]) > len(blocks[request_id]) * BLOCK_SIZE:
                blocks[request_id].append(rng.randrange(50))
                batch.append_blocks(request_id, blocks[request_id][-1:])
        batch.append_tokens(growing, [tokens[request_id][-1] for request_id in growing])
    batch.drop("unknown")


def test_a_step_costs_the_same_array_operations_for_any_number_of_requests() -> None:
    """Memory for every request that may run is reserved, not touched."""
    batch = InputBatch(max_num_seqs=1024, max_model_len=131_072, block_size=16)
    batch.add(new_request("r", [1, 2], [3]))
    inputs = batch.build_inputs([ScheduledRequest("r", 1, 1)])
    assert inputs.metadata.block_table.shape == (1, 1)
    assert inputs.metadata.slot_mapping.tolist() == [3 * 16 + 1]
    assert isinstance(batch.get_token_ids("r"), np.ndarray)
