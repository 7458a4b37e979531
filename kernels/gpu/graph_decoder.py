"""Decode steps as CUDA graphs: all layers of a model replayed by one call.

A step of a small model launches some 250 kernels, which takes longer than they do. A graph holds the launches of a
step of a fixed size, on memory of its own: a step is padded to the next size, copied there, and replayed. The kernels
are those of a step without a graph, so are the bits.

A size's first step runs without a graph, and captures one behind it: by then all kernels are compiled, which cannot
happen inside a capture. Prompts' chunks, and steps whose layers a connector watches, are never replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pdserve.kernels.base import AttentionMetadata, Rotation
from pdserve.kernels.decoder import LayerHook
from pdserve.kernels.gpu.step import DeviceStep, StepShape
from pdserve.kernels.gpu.triton_plan import TritonPlan
from pdserve.kernels.layer_loop import LayerLoop

MAX_ROWS = 256
"""Requests of the largest step that is replayed; beyond it kernels take longer than their launches."""
MIN_TABLE_WIDTH = 64


class Capture(Protocol):
    """Records what a function launches."""

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Give what launches it all again, and the result that is then written."""
        ...


class CudaCapture:
    """`Capture` by CUDA; graphs share one pool of memory, because they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """See `Capture`. Other threads, as connectors have, may go on copying meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        return graph.replay, result


@dataclass(frozen=True)
class _Size:
    """What a graph is made for: rows of a decode step, width of its block table, and the pool it reads."""

    num_rows: int
    table_width: int
    pool_address: int

    @classmethod
    def build(cls, metadata: AttentionMetadata, kv_cache: Tensor) -> _Size:
        """The size that takes the step in: powers of two, so that there are few."""
        num_rows, table_width = metadata.block_table.shape
        width = max(MIN_TABLE_WIDTH, _round_up(table_width))
        return cls(_round_up(num_rows), width, kv_cache.data_ptr())


class _Graph:
    """The graph of one size, and the memory that it reads and writes."""

    def __init__(
        self,
        size: _Size,
        loop: LayerLoop,
        residual_TD: Tensor,
        rotation: Rotation,
        kv_cache: Tensor,
        capture: Capture,
    ) -> None:
        """Memory like ``residual``'s and ``rotation``'s, for the size's number of rows, and a graph on it."""
        self._residual, self._cos, self._sin = (
            x.new_zeros(size.num_rows, x.shape[1]) for x in (residual_TD, rotation.cos_TH, rotation.sin_TH)
        )
        shape = StepShape(size.num_rows, size.num_rows, size.num_rows, size.table_width)
        self._step = DeviceStep(shape, residual_TD.device)
        # Nobody's tokens: a capture may run what it records.
        self._step.fill(AttentionMetadata.build([], [], [], kv_cache.shape[4]))
        plan = TritonPlan(self._step, loop.scale)
        padded_rotation = Rotation(self._cos, self._sin)
        self._replay, self._hidden = capture(lambda: loop.run(self._residual, plan, padded_rotation, kv_cache))

    def run(self, residual_RD: Tensor, metadata: AttentionMetadata, rotation: Rotation) -> Tensor:
        """Replay the graph for a step that is no larger; [R, D], the caller's own."""
        num_rows = residual_RD.shape[0]
        self._residual[:num_rows].copy_(residual_RD)
        self._residual[num_rows:] = 0
        self._cos[:num_rows].copy_(rotation.cos_TH)
        self._sin[:num_rows].copy_(rotation.sin_TH)
        self._step.fill(metadata)
        self._replay()
        return self._hidden[:num_rows].clone()


class GraphDecoder:
    """See `pdserve.kernels.decoder.FusedDecoder`.

    Args:
        loop: the layers; their backend's plans are `TritonPlan`.
        capture: makes graphs.
    """

    def __init__(self, loop: LayerLoop, capture: Capture) -> None:
        self._loop = loop
        self._capture = capture
        self._graphs: dict[_Size, _Graph] = {}

    def forward(
        self,
        residual_TD: Tensor,
        metadata: AttentionMetadata,
        rotation: Rotation,
        kv_cache: Tensor,
        on_layer: LayerHook | None,
    ) -> Tensor:
        """See `pdserve.kernels.decoder.FusedDecoder.forward`."""
        num_rows = residual_TD.shape[0]
        if on_layer is not None or num_rows != len(metadata.seq_lens_array) or num_rows > MAX_ROWS:
            return self._loop.forward(residual_TD, metadata, rotation, kv_cache, on_layer)
        size = _Size.build(metadata, kv_cache)
        graph = self._graphs.get(size)
        if graph is not None:
            return graph.run(residual_TD, metadata, rotation)
        hidden_TD = self._loop.forward(residual_TD, metadata, rotation, kv_cache, None)
        self._graphs[size] = _Graph(size, self._loop, residual_TD, rotation, kv_cache, self._capture)
        return hidden_TD


def _round_up(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()
