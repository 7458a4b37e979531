"""The ranks of one machine: columns through shared memory, what goes from stage to stage through torch.distributed.

Within a layer ranks wait microseconds for each other, four times, and never sleep. A stage waits for as long as the
one before it computes: gloo, over loopback, lets it sleep. Nothing here is global to the process, so a test can run
ranks as threads. Stages find each other by a file, not by a port that somebody else could take or join.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor, distributed

from pdserve.engine.parallel.shared_memory import create_shared_memory
from pdserve.errors import EngineError
from pdserve.kernels.rank_exchange import RankExchange, exchange_bytes
from pdserve.kv_layout import Rank

# torch's type stubs leave out most of what these have.
_ProcessGroupGloo: Any = distributed.ProcessGroupGloo
_distributed: Any = distributed

LOOPBACK = "127.0.0.1"
TIMEOUT_S = 300.0
"""How long a rank waits for another one: longer than a step takes, so that what is lost is told from what is slow."""


class HostGroup:
    """See `pdserve.engine.models.sharded_lm.RankGroup`. Used by one thread.

    Args:
        rank: this one.
        exchange_fd: memory that the ranks of this stage share, of `create_exchanges`; None where it has one rank.
        rendezvous: a file that all ranks name, in a directory that only their user may enter; the first one makes it.
        timeout_s: how long a call waits for the other ranks.

    Raises:
        ConfigError: there are no compiled kernels here, which several ranks in a stage need.
        EngineError: the other stages do not come in time.
    """

    def __init__(self, rank: Rank, exchange_fd: int | None, rendezvous: Path, timeout_s: float = TIMEOUT_S) -> None:
        self._rank = rank
        self._exchange: RankExchange | None = None
        self._stages: Any = None
        if exchange_fd is not None:
            self._exchange = RankExchange(exchange_fd, rank.tensor_parallel_rank, rank.tensor_parallel_size, timeout_s)
        if rank.pipeline_parallel_size > 1:
            self._stages = _connect_stages(rank, rendezvous, timeout_s)

    @property
    def rank(self) -> Rank:
        """Which one it is."""
        return self._rank

    def gather(self, columns: Tensor) -> Tensor:
        """See `RankGroup.gather`.

        Raises:
            TimeoutError: another rank does not come.
        """
        return columns if self._exchange is None else self._exchange.gather(columns)

    def send_to_next_stage(self, x: Tensor) -> None:
        """See `RankGroup.send_to_next_stage`.

        Raises:
            EngineError: the next stage is lost.
        """
        try:
            self._stages.send([x], self._rank.pipeline_parallel_rank + 1, 0).wait()
        except RuntimeError as error:
            raise EngineError(f"the next stage of this engine is lost: {error}") from error

    def receive_from_previous_stage(self, into: Tensor) -> None:
        """See `RankGroup.receive_from_previous_stage`.

        Raises:
            EngineError: the stage before is lost.
        """
        try:
            self._stages.recv([into], self._rank.pipeline_parallel_rank - 1, 0).wait()
        except RuntimeError as error:
            raise EngineError(f"the stage of this engine before this one is lost: {error}") from error


def create_exchanges(rank: Rank) -> list[int]:
    """Memory for the ranks of each stage, as file descriptors; none where a stage has one rank.

    Raises:
        ConfigError: this system has none, or no compiled kernels.
    """
    if rank.tensor_parallel_size == 1:
        return []
    num_bytes = exchange_bytes(rank.tensor_parallel_size)
    return [create_shared_memory("columns", num_bytes) for _ in range(rank.pipeline_parallel_size)]


def _connect_stages(rank: Rank, rendezvous: Path, timeout_s: float) -> Any:
    """A gloo group of the ranks that have the same share of every stage."""
    options = _ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=timeout_s)
    options._devices = [_ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    try:
        store = _distributed.FileStore(str(rendezvous), rank.size)
        store.set_timeout(timedelta(seconds=timeout_s))
        share = _distributed.PrefixStore(f"share{rank.tensor_parallel_rank}", store)
        return _ProcessGroupGloo(share, rank.pipeline_parallel_rank, rank.pipeline_parallel_size, options)
    except RuntimeError as error:
        raise EngineError(f"the stages of this engine do not find each other: {error}") from error
