"""One report of all ranks: what the scheduler half, and the engine, hear of an engine's worker halves.

::

    rank 0   a: 48 of 64 good ─────────────────┐
    rank 1   ·······(still writes)··· a: ended ┴─> a failed with 48 good tokens

A transfer has ended when every rank has said so, and is as good as its worst share. That holds also when one has failed
long before: the others may still be writing to the blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pdserve.connectors.base import ConnectorOutput, ConnectorStats

_PART = "ranks"


@dataclass(slots=True)
class _Transfer:
    """One request's load or sending.

    Attributes:
        pending: ranks that have not reported.
        num_good_tokens: the smallest count of those that failed; None = none has.
        num_bytes: of all that have reported.
    """

    pending: set[int]
    num_good_tokens: int | None = None
    num_bytes: int = 0


class OutputAggregator:
    """Lives where the ranks' reports of one engine arrive.

    Args:
        num_ranks: of the engine.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._loads: dict[str, _Transfer] = {}
        self._sends: dict[str, _Transfer] = {}
        self._rejected = ConnectorStats()

    def expect(self, loads: Iterable[str], sends: Iterable[str]) -> None:
        """Say which transfers the ranks hear of in the step that begins; before `merge`.

        Args:
            loads: requests whose asynchronous load begins.
            sends: requests whose sending is to be reported (`KVConnectorWorker.get_finished`).
        """
        for transfers, request_ids in ((self._loads, loads), (self._sends, sends)):
            for request_id in request_ids:
                transfers[request_id] = _Transfer(set(range(self._num_ranks)))

    def merge(self, outputs: Sequence[ConnectorOutput]) -> ConnectorOutput:
        """One report of a step's reports.

        Transfers that ended in all ranks; counters are sums, blocks that any rank could not fill are invalid, and the
        connector's own messages follow each other. What nobody expects (an unknown request, one that a rank has
        reported before) is left out and counted as failure ``late_report``.

        Args:
            outputs: of each rank, in their order.
        """
        merged = ConnectorOutput()
        for rank, output in enumerate(outputs):
            self._take_loads(rank, output, merged)
            self._take_sends(rank, output, merged)
            merged.invalid_block_ids |= output.invalid_block_ids
            merged.messages += output.messages
            merged.stats.add(output.stats)
            for name, stats in output.parts.items():
                merged.parts.setdefault(name, ConnectorStats()).add(stats)
        self._add_rejected(merged)
        return merged

    def _take_loads(self, rank: int, output: ConnectorOutput, merged: ConnectorOutput) -> None:
        for request_id in output.finished_receiving | output.failed_receiving.keys():
            load = self._take(self._loads, rank, request_id, output.received_bytes)
            num_good_tokens = output.failed_receiving.get(request_id)
            if load is None:
                continue
            if num_good_tokens is not None and (load.num_good_tokens is None or num_good_tokens < load.num_good_tokens):
                load.num_good_tokens = num_good_tokens
            if load.pending:
                continue
            del self._loads[request_id]
            merged.received_bytes[request_id] = load.num_bytes
            if load.num_good_tokens is None:
                merged.finished_receiving.add(request_id)
            else:
                merged.failed_receiving[request_id] = load.num_good_tokens

    def _take_sends(self, rank: int, output: ConnectorOutput, merged: ConnectorOutput) -> None:
        for request_id in output.finished_sending | output.failed_sending:
            send = self._take(self._sends, rank, request_id, output.sent_bytes)
            if send is None:
                continue
            if request_id in output.failed_sending:
                send.num_good_tokens = 0
            if send.pending:
                continue
            del self._sends[request_id]
            merged.sent_bytes[request_id] = send.num_bytes
            merged.finished_sending.add(request_id)
            if send.num_good_tokens is not None:
                merged.failed_sending.add(request_id)

    def _take(
        self, transfers: dict[str, _Transfer], rank: int, request_id: str, num_bytes: Mapping[str, int]
    ) -> _Transfer | None:
        """Note that a rank's share has ended; None when it is not expected to."""
        transfer = transfers.get(request_id)
        if transfer is None or rank not in transfer.pending:
            self._rejected.count_failure("late_report")
            return None
        transfer.pending.discard(rank)
        transfer.num_bytes += num_bytes.get(request_id, 0)
        return transfer

    def _add_rejected(self, merged: ConnectorOutput) -> None:
        if not self._rejected.failures:
            return
        merged.stats.add(self._rejected)
        if merged.parts:  # their sum is what the whole counts
            merged.parts.setdefault(_PART, ConnectorStats()).add(self._rejected)
        self._rejected = ConnectorStats()
