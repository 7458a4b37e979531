"""The collectives between ranks, by torch.distributed's gloo over loopback.

Nothing global: a group is an object of its own, so that a test can run ranks as threads. The ranks find each other by a
file, not by a port that somebody else could take or join.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from pdserve.errors import EngineError
from pdserve.kv_layout import Rank

# torch's type stubs leave out most of what these have.
_ProcessGroupGloo: Any = distributed.ProcessGroupGloo
_distributed: Any = distributed

LOOPBACK = "127.0.0.1"
TIMEOUT_S = 300.0
"""How long a rank waits for another one: longer than a step takes, so that what is lost is told from what is slow."""


class GlooGroup:
    """See `pdserve.engine.models.sharded_lm.RankGroup`. Used by one thread.

    Args:
        rank: this one.
        rendezvous: a file that all ranks name, in a directory that only their user may enter; the first one makes it.
        timeout_s: how long a call waits for the other ranks.

    Raises:
        EngineError: the others do not come in time.
    """

    def __init__(self, rank: Rank, rendezvous: Path, timeout_s: float = TIMEOUT_S) -> None:
        self._rank = rank
        store = _distributed.FileStore(str(rendezvous), rank.size)
        store.set_timeout(timedelta(seconds=timeout_s))
        stage, share = rank.pipeline_parallel_rank, rank.tensor_parallel_rank
        self._stage = _Gloo(store, f"stage{stage}", share, rank.tensor_parallel_size, timeout_s)
        self._pipeline = _Gloo(store, f"share{share}", stage, rank.pipeline_parallel_size, timeout_s)

    @property
    def rank(self) -> Rank:
        """Which one it is."""
        return self._rank

    def gather(self, columns: Tensor) -> Tensor:
        """See `RankGroup.gather`.

        Raises:
            EngineError: another rank is lost.
        """
        return self._stage.gather(columns)

    def send_to_next_stage(self, x: Tensor) -> None:
        """See `RankGroup.send_to_next_stage`.

        Raises:
            EngineError: the other rank is lost.
        """
        self._pipeline.send(x, self._rank.pipeline_parallel_rank + 1)

    def receive_from_previous_stage(self, into: Tensor) -> None:
        """See `RankGroup.receive_from_previous_stage`.

        Raises:
            EngineError: the other rank is lost.
        """
        self._pipeline.receive(into, self._rank.pipeline_parallel_rank - 1)


class _Gloo:
    """One gloo group; none is made for a rank that is alone in it."""

    def __init__(self, store: Any, name: str, index: int, size: int, timeout_s: float) -> None:
        self._size = size
        self._group: Any = None
        if size == 1:
            return
        options = _ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [_ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        try:
            self._group = _ProcessGroupGloo(_distributed.PrefixStore(name, store), index, size, options)
        except RuntimeError as error:
            raise EngineError(f"the ranks of this engine do not find each other: {error}") from error

    def gather(self, columns: Tensor) -> Tensor:
        if self._group is None:
            return columns
        gathered: Tensor = columns.new_empty(self._size, *columns.shape)
        try:
            self._group.allgather([list(gathered.unbind(0))], [columns.contiguous()]).wait()
        except RuntimeError as error:
            raise EngineError(f"another rank of this engine is lost: {error}") from error
        return torch.cat(gathered.unbind(0), dim=1)

    def send(self, x: Tensor, to: int) -> None:
        assert self._group is not None
        try:
            self._group.send([x], to, 0).wait()
        except RuntimeError as error:
            raise EngineError(f"the next rank of this engine is lost: {error}") from error

    def receive(self, into: Tensor, source: int) -> None:
        assert self._group is not None
        try:
            self._group.recv([into], source, 0).wait()
        except RuntimeError as error:
            raise EngineError(f"the rank of this engine before this one is lost: {error}") from error
