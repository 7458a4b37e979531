"""The forward pass against transformers, and its bits against themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import BLOCK_SIZE, CONFIGS, Session, build_reference, save

from pdserve.engine.models import CausalLM, load_model
from pdserve.errors import ConfigError
from pdserve.kernels.base import AttentionMetadata
from pdserve.kernels.invariance import check_invariance
from pdserve.kernels.registry import DTYPES, backend_names, get_backend

TOKENS = torch.randint(0, 131, (200,), generator=torch.Generator().manual_seed(5))


def load(directory: Path, dtype: torch.dtype, backend: str = "auto") -> CausalLM:
    return load_model(directory, dtype, get_backend(backend, dtype))


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_logits_agree_with_transformers(name: str, tmp_path: Path) -> None:
    reference = build_reference(name)
    model = load(save(reference, tmp_path), torch.float32)
    with torch.no_grad():
        expected = reference(TOKENS[None]).logits[0]
    actual = Session(model, torch.float32).run_chunks(TOKENS, 75)
    assert expected.abs().max() > 1  # logits that say something
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


@pytest.fixture(params=[(name, dtype) for name in backend_names() for dtype in DTYPES], ids=str)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> CausalLM:
    name, dtype = request.param
    try:
        get_backend(name, dtype)
    except ConfigError as error:
        pytest.skip(f"does not run here: {error}")
    return load(save(build_reference("llama-gqa3"), tmp_path), dtype, name)


@pytest.mark.parametrize("kv_dtype", DTYPES, ids=str)
def test_chunks_and_blocks_change_no_bit(model: CausalLM, kv_dtype: torch.dtype) -> None:
    whole = Session(model, kv_dtype).run_chunks(TOKENS, 200)
    for chunk, seed in ((1, 1), (16, 2), (64, 3)):
        assert torch.equal(Session(model, kv_dtype, seed=seed).run_chunks(TOKENS, chunk), whole), chunk


def test_neighbours_change_no_bit(model: CausalLM) -> None:
    """A decode step of one request: alone, and beside others that decode and prefill in the same memory."""
    config = model.config
    shape = (80, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
    lens = [150, 3, 40, 129, 70]
    blocks = [list(range(15 * r, 15 * r + 12)) for r in range(5)]

    def decode(kv_cache: torch.Tensor, beside: list[int]) -> torch.Tensor:
        chosen = [0, *beside]
        tokens = [TOKENS[lens[r] : lens[r] + 1] for r in chosen]
        query_lens, seq_lens, tables = [1] * len(chosen), [lens[r] + 1 for r in chosen], [blocks[r] for r in chosen]
        if beside:  # and one that prefills
            tokens.append(TOKENS[:60])
            query_lens, seq_lens, tables = [*query_lens, 60], [*seq_lens, 60], [*tables, [75, 76, 77, 78]]
        metadata = AttentionMetadata.build(query_lens, seq_lens, tables, BLOCK_SIZE)
        return model.compute_logits(model.forward(torch.cat(tokens), metadata, kv_cache))[0]

    results = []
    for beside in ([], [1, 2, 3, 4]):
        kv_cache = torch.full(shape, float("nan"), dtype=torch.float32)
        for r in (0, *beside):
            metadata = AttentionMetadata.build([lens[r]], [lens[r]], [blocks[r]], BLOCK_SIZE)
            model.forward(TOKENS[: lens[r]], metadata, kv_cache)
        results.append(decode(kv_cache, beside))
    assert torch.equal(results[0], results[1])


def test_bfloat16_is_near_float32(tmp_path: Path) -> None:
    """As near as transformers' own bfloat16 is, within its noise."""
    reference = build_reference("llama")
    directory = save(reference, tmp_path)
    with torch.no_grad():
        exact = reference(TOKENS[None]).logits[0]
        theirs = reference.to(torch.bfloat16)(TOKENS[None]).logits[0].float()
    ours = Session(load(directory, torch.bfloat16), torch.bfloat16).run_chunks(TOKENS, 200)
    assert ours.dtype == torch.float32
    assert (ours - exact).square().mean() < 1.2 * (theirs - exact).square().mean()


class RecordedHook:
    """Notes, around each layer's attention, whether the step's KV of that layer stands in the cache."""

    def __init__(self, kv_cache: torch.Tensor, block: int) -> None:
        self._kv_cache, self._block = kv_cache, block
        self.events: list[tuple[str, int, bool]] = []

    def before_layer(self, layer: int) -> None:
        self.events.append(("before", layer, self._is_written(layer)))

    def after_layer(self, layer: int) -> None:
        self.events.append(("after", layer, self._is_written(layer)))

    def _is_written(self, layer: int) -> bool:
        return not bool(self._kv_cache[self._block, layer, :, :, 0].isnan().any())


def test_the_hook_is_called_around_each_layer(model: CausalLM) -> None:
    session = Session(model, torch.float32)
    hook = RecordedHook(session.kv_cache, session.block_ids[0])
    metadata = AttentionMetadata.build([3], [3], [session.block_ids], BLOCK_SIZE)
    model.forward(TOKENS[:3], metadata, session.kv_cache, hook)
    assert hook.events == [("before", 0, False), ("after", 0, True), ("before", 1, False), ("after", 1, True)]


def test_the_self_check_passes(model: CausalLM) -> None:
    assert check_invariance(model)
