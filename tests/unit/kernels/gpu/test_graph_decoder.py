"""Graphs' sizes, padding and copies; where there is no GPU, Triton interprets and a graph calls its function again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pdserve.kernels.base import AttentionMetadata, Rotation
from pdserve.kernels.decoder import DecoderShape, LayerWeights

pytest.importorskip("triton", reason="Triton is not installed: pdserve[gpu]")

from pdserve.kernels.gpu.graph_decoder import Capture, CudaCapture
from pdserve.kernels.gpu.triton_backend import TritonBackend

BF16 = torch.bfloat16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_LAYERS, HIDDEN, INNER, BLOCK_SIZE = 1, 32, 48, 16
SHAPE = DecoderShape(num_heads=4, num_kv_heads=2, head_dim=16, rms_norm_eps=1e-5)


def capture_by_calling(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    result = run()
    return lambda: result.copy_(run()), result


class Recorder:
    """A `Capture` that writes down the size of each graph and each replay."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self._capture: Capture = CudaCapture() if DEVICE.type == "cuda" else capture_by_calling

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        replay, result = self._capture(run)
        num_rows = result.shape[0]
        self.events.append(("capture", num_rows))

        def write_down_and_replay() -> None:
            self.events.append(("replay", num_rows))
            replay()

        return write_down_and_replay, result


class Watcher:
    def __init__(self) -> None:
        self.layers: list[int] = []

    def before_layer(self, layer: int) -> None:
        self.layers.append(layer)

    def after_layer(self, layer: int) -> None:
        self.layers.append(layer)


class Models:
    """One model twice: with graphs and without, each with KV memory of its own."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def tensor(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(DEVICE, BF16)

        def build_layer(backend: TritonBackend) -> LayerWeights:
            heads = SHAPE.num_heads * SHAPE.head_dim
            kv_heads = SHAPE.num_kv_heads * SHAPE.head_dim
            return LayerWeights(
                input_norm=tensor(HIDDEN),
                qkv=backend.prepare_linear(tensor(heads + 2 * kv_heads, HIDDEN) * HIDDEN**-0.5, None),
                q_norm=None,
                k_norm=None,
                output=backend.prepare_linear(tensor(HIDDEN, heads) * heads**-0.5, None),
                post_attention_norm=tensor(HIDDEN),
                gate_up=backend.prepare_linear(tensor(2 * INNER, HIDDEN) * HIDDEN**-0.5, None),
                down=backend.prepare_linear(tensor(HIDDEN, INNER) * INNER**-0.5, None),
            )

        self.recorder = Recorder()
        plain, graphs = TritonBackend(BF16, DEVICE), TritonBackend(BF16, DEVICE, capture=self.recorder)
        layers = [build_layer(plain) for _ in range(NUM_LAYERS)]
        final_norm = tensor(HIDDEN)
        self.decoders = [backend.build_decoder(layers, final_norm, SHAPE) for backend in (plain, graphs)]
        pool = torch.randn(24, NUM_LAYERS, 2, SHAPE.num_kv_heads, BLOCK_SIZE, SHAPE.head_dim, generator=generator)
        self.pools = [pool.to(DEVICE, BF16, copy=True) for _ in self.decoders]

    def run(self, query_lens: list[int], seq_lens: list[int], on_layer: Watcher | None = None) -> None:
        """The same step with both: equal results, equal memory."""
        blocks = [list(range(3 * r, 3 * r + 3)) for r in range(len(seq_lens))]
        metadata = AttentionMetadata.build(query_lens, seq_lens, blocks, BLOCK_SIZE)
        generator = torch.Generator().manual_seed(sum(seq_lens))
        residual = torch.randn(sum(query_lens), HIDDEN, generator=generator).to(DEVICE, BF16)
        angles = torch.rand(sum(query_lens), SHAPE.head_dim // 2, generator=generator).to(DEVICE)
        cos, sin = angles.cos(), angles.sin()
        rotation = Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
        expected, actual = (
            decoder.forward(residual.clone(), metadata, rotation, pool, on_layer)
            for decoder, pool in zip(self.decoders, self.pools, strict=True)
        )
        assert expected.isfinite().all()
        assert torch.equal(actual, expected)
        assert torch.equal(self.pools[0].view(torch.int16), self.pools[1].view(torch.int16))


def test_decode_steps_are_replayed_padded_to_the_next_size() -> None:
    models = Models()
    models.run([1, 1, 1], [5, 17, 40])
    models.run([1, 1, 1], [6, 18, 41])
    models.run([1, 1, 1, 1], [7, 19, 42, 1])
    models.run([1], [8])
    assert models.recorder.events == [("capture", 4), ("replay", 4), ("replay", 4), ("capture", 1)]


def test_a_result_is_the_callers_own() -> None:
    models = Models()
    metadata = AttentionMetadata.build([1], [5], [[0]], BLOCK_SIZE)
    rotation = Rotation(*(torch.full((1, SHAPE.head_dim), value, device=DEVICE) for value in (1.0, 0.0)))
    residuals = [torch.full((1, HIDDEN), value, dtype=BF16, device=DEVICE) for value in (1.0, 2.0, -3.0)]
    results = [models.decoders[1].forward(x, metadata, rotation, models.pools[1], None) for x in residuals]
    kept = results[1].clone()
    models.decoders[1].forward(residuals[2].neg(), metadata, rotation, models.pools[1], None)
    assert torch.equal(results[1], kept)


def test_chunks_and_watched_steps_are_not_replayed() -> None:
    models = Models()
    models.run([2], [17])
    watcher = Watcher()
    models.run([1], [6], watcher)
    assert watcher.layers == [0, 0] * 2
    assert models.recorder.events == []


def test_another_pool_gets_graphs_of_its_own() -> None:
    models = Models()
    models.run([1], [5])
    models.pools[1] = models.pools[1].clone()
    models.run([1], [6])
    models.run([1], [7])
    assert models.recorder.events == [("capture", 1), ("capture", 1), ("replay", 1)]
