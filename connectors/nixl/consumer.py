"""The consumer's side: from a reference to verified blocks.

A load's way::

    start ──> CONNECTING ──> OPENING ──> READING ──> CLOSING ──> verified, reported
                  │             │           │           │
                  └──── refused, lost, late, cancelled ─┴──> reported as failed, blocks wiped

Blocks count only when the producer has said, after the last byte came, that the lease still held, and when every
block's checksum is the producer's: NIXL reports success for memory that was given to somebody else meanwhile.

Lives on the transfer thread. Loads are read one after the other, a piece at a time, so that in between signs of life
go out and cancellations are seen.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from pdserve.connectors.blocks.failures import Failure, WarningLimiter
from pdserve.connectors.nixl import wire
from pdserve.connectors.nixl.agent import RemotePool, TransferAgent, TransportError
from pdserve.connectors.nixl.loads import ActiveLoad, Phase
from pdserve.connectors.nixl.messages import Endpoint, Load, TransferReference
from pdserve.connectors.nixl.pool_memory import PoolMemory
from pdserve.connectors.nixl.producer import explain_difference
from pdserve.connectors.nixl.report import TransferReport
from pdserve.kv_layout import ModelIdentity

_PIECE_BYTES = 4 << 20
"""Bytes of one read: they are still in the processor's cache when their checksum is computed."""
_EXTENSIONS_A_LEASE = 4


class Channel(Protocol):
    """A consumer's connection to one producer's side channel."""

    def send(self, message: wire.ConsumerMessage) -> None:
        """Send; never blocks."""
        ...

    def close(self) -> None:
        """Drop the connection; what was sent before still goes out."""
        ...


@dataclass(slots=True, eq=False)
class Peer:
    """One incarnation of a producer.

    Attributes:
        key: who it is.
        channel: to its side channel.
        remote: its blocks, once it has said Welcome.
        num_blocks: how many those are.
        loads: those under way, by transfer id.
    """

    key: Endpoint
    channel: Channel
    remote: RemotePool | None = None
    num_blocks: int = 0
    loads: dict[str, ActiveLoad] = field(default_factory=dict)


class Consumer:
    """See the module.

    Args:
        identity: this engine's model.
        agent: reads.
        memory: the pool.
        block_size: S.
        report: told of each load's end.
        warnings: log lines for people.
        open_channel: connects to a producer; raises ValueError when its address is not one to connect to.
        timeout_s: longest wait for an answer, and for a piece of a read.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        identity: ModelIdentity,
        agent: TransferAgent,
        memory: PoolMemory,
        report: TransferReport,
        warnings: WarningLimiter,
        *,
        open_channel: Callable[[Endpoint], Channel],
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._identity = identity
        self._agent = agent
        self._memory = memory
        self._block_size = identity.kv.block_size
        self._blocks_in_piece = max(_PIECE_BYTES // memory.region.block_bytes, 1)
        self._report = report
        self._warnings = warnings
        self._open_channel = open_channel
        self._timeout_s = timeout_s
        self._clock = clock
        self._peers: dict[Endpoint, Peer] = {}
        self._loads: dict[str, tuple[Peer, ActiveLoad]] = {}
        self._reading: deque[tuple[Peer, ActiveLoad]] = deque()
        self._read: Any = None
        self._num_in_read = 0

    # --- the engine's wishes ----------------------------------------------------------------------------------

    def start(self, load: Load) -> None:
        """Begin a load; one whose request has a load under way is refused and counted."""
        if load.request_id in self._loads:
            self._report.count_failure("duplicate")
            return
        now = self._clock()
        active = ActiveLoad(load, began_at=now, deadline=now + self._timeout_s)
        try:
            peer = self._get_peer(load.reference)
        except ValueError as error:
            self._end(active, Failure("foreign", str(error)))
            return
        if active.transfer_id in peer.loads:
            self._end(active, Failure("duplicate", "the transfer is being read already"))
            return
        self._loads[load.request_id] = (peer, active)
        peer.loads[active.transfer_id] = active
        if peer.remote is not None:
            self._open(peer, active)

    def cancel(self, request_id: str) -> None:
        """The request has ended: end its load as soon as nothing is written to its blocks any more."""
        peer, active = self._loads.get(request_id, (None, None))
        if peer is None or active is None:
            return
        active.is_cancelled = True
        if self._is_in_read(active) or active.phase is Phase.CLOSING:
            return  # a moment, and the blocks are at rest
        self._abandon(peer, active, None)

    def release(self, reference: TransferReference) -> None:
        """Tell the producer that nobody will come for a transfer; if it cannot be told, its lease ends by itself."""
        with contextlib.suppress(ValueError):
            self._get_peer(reference).channel.send(wire.Cancel(reference.transfer_id))

    # --- producers' messages ----------------------------------------------------------------------------------

    def receive(self, producer: Endpoint, message: wire.ProducerMessage) -> None:
        """Take in one message of a producer."""
        peer = self._peers.get(producer)
        if peer is None:
            return
        match message:
            case wire.Welcome():
                self._take_welcome(peer, message)
            case wire.Opened():
                self._take_opened(peer, message)
            case wire.Closed():
                self._take_closed(peer, message)
            case wire.Refused(transfer_id=""):
                self._lose(peer, Failure(message.kind, message.reason))
            case wire.Refused():
                self._take_refused(peer, message)

    def lose(self, producer: Endpoint, reason: str) -> None:
        """The connection to a producer broke."""
        peer = self._peers.get(producer)
        if peer is not None:
            self._lose(peer, Failure("disconnected", reason))

    # --- time -------------------------------------------------------------------------------------------------

    @property
    def wants_to_run(self) -> bool:
        """Whether `advance` has something to do at once."""
        return bool(self._reading)

    @property
    def is_waiting_for_read(self) -> bool:
        """Whether a read goes on in the background."""
        return self._read is not None

    @property
    def next_due(self) -> float | None:
        """When `advance` must be called at the latest."""
        times = [active.deadline for _, active in self._loads.values()]
        times += [active.extend_at for _, active in self._loads.values() if active.is_opened]
        return min(times, default=None)

    def advance(self) -> None:
        """Go on by a piece of a read; send signs of life; end what is late."""
        self._read_on()
        now = self._clock()
        for peer, active in list(self._loads.values()):
            if now >= active.deadline and self._loads.get(active.load.request_id) is not None:
                self._end_late(peer, active)
        for peer in self._peers.values():
            self._extend(peer, now)

    def drop_all(self, reason: str) -> None:
        """Give everything up and disconnect. Reads that go on are stopped first."""
        for peer in list(self._peers.values()):
            self._lose(peer, Failure("disconnected", reason))

    # --- peers ------------------------------------------------------------------------------------------------

    def _get_peer(self, reference: TransferReference) -> Peer:
        """The producer that a reference is of; greeted when it is new.

        Raises:
            ValueError: the address is not one to connect to.
        """
        key = Endpoint(reference.address, reference.generation)
        peer = self._peers.get(key)
        if peer is None:
            peer = self._peers[key] = Peer(key, self._open_channel(key))
            peer.channel.send(wire.Hello(self._identity))
        return peer

    def _lose(self, peer: Peer, failure: Failure) -> None:
        """Forget a producer; its loads fail."""
        self._peers.pop(peer.key, None)
        if self._read is not None and self._reading[0][0] is peer:
            self._agent.release(self._read)
            self._read = None
        # Only now is it certain that nothing is written to the loads' blocks any more.
        if peer.remote is not None:
            self._agent.disconnect(peer.remote)
            peer.remote = None
        for active in list(peer.loads.values()):
            self._finish(peer, active, failure)
        peer.channel.close()

    def _take_welcome(self, peer: Peer, message: wire.Welcome) -> None:
        if message.generation != peer.key.generation:
            self._lose(peer, Failure("stale", "the producer has been restarted since"))
            return
        if message.identity != self._identity:
            self._lose(peer, Failure("foreign", explain_difference(self._identity, message.identity)))
            return
        if message.memory.block_bytes != self._memory.region.block_bytes:
            self._lose(peer, Failure("foreign", "the producer's blocks are of another size"))
            return
        try:
            peer.remote = self._agent.connect(message.agent, message.memory)
        except TransportError as error:
            self._lose(peer, Failure(error.kind, error.reason))
            return
        peer.num_blocks = message.memory.num_blocks
        for active in list(peer.loads.values()):
            self._open(peer, active)

    def _extend(self, peer: Peer, now: float) -> None:
        due = [active for active in peer.loads.values() if active.is_opened and now >= active.extend_at]
        if due:
            peer.channel.send(wire.Extend([active.transfer_id for active in due]))
        for active in due:
            active.extend_at = now + active.extend_interval_s

    # --- one load ---------------------------------------------------------------------------------------------

    def _open(self, peer: Peer, active: ActiveLoad) -> None:
        active.phase = Phase.OPENING
        active.deadline = self._clock() + self._timeout_s
        peer.channel.send(wire.Open(active.transfer_id, active.load.digest))

    def _take_opened(self, peer: Peer, message: wire.Opened) -> None:
        active = peer.loads.get(message.transfer_id)
        if active is None or active.phase is not Phase.OPENING:
            peer.channel.send(wire.Cancel(message.transfer_id))  # given up meanwhile
            return
        if not active.take_opened(message.block_ids, peer.num_blocks):
            self._abandon(peer, active, Failure("foreign", "the producer offers other blocks than the prompt's"))
            return
        active.phase = Phase.READING
        active.deadline = float("inf")  # until it is its turn
        active.extend_interval_s = message.lease_s / _EXTENSIONS_A_LEASE
        active.extend_at = self._clock() + active.extend_interval_s
        self._reading.append((peer, active))

    def _read_on(self) -> None:
        """Start the next piece of the load whose turn it is, or look after the one under way."""
        if not self._reading:
            return
        peer, active = self._reading[0]
        try:
            if self._read is None:
                self._start_piece(peer, active)
            elif self._agent.poll(self._read):
                self._read = None
                self._end_piece(peer, active)
        except TransportError as error:
            self._read = None
            self._lose(peer, Failure(error.kind, error.reason))

    def _start_piece(self, peer: Peer, active: ActiveLoad) -> None:
        assert peer.remote is not None, "opened by a producer that said Welcome"
        start = active.num_started
        end = min(start + self._blocks_in_piece, active.num_blocks)
        active.num_started = end
        self._num_in_read = end - start
        active.deadline = self._clock() + self._timeout_s
        self._read = self._agent.start_read(
            active.load.block_ids[start:end], peer.remote, active.remote_block_ids[start:end]
        )
        if self._read is None:
            self._end_piece(peer, active)

    def _end_piece(self, peer: Peer, active: ActiveLoad) -> None:
        end = active.num_started
        active.checksums.append(self._memory.get_checksums(active.load.block_ids[end - self._num_in_read : end]))
        if active.is_cancelled:
            self._abandon(peer, active, None)
        elif end == active.num_blocks:
            self._reading.popleft()
            active.phase = Phase.CLOSING
            active.deadline = self._clock() + self._timeout_s
            peer.channel.send(wire.Close(active.transfer_id, active.num_blocks))

    def _take_closed(self, peer: Peer, message: wire.Closed) -> None:
        active = peer.loads.get(message.transfer_id)
        if active is None or active.phase is not Phase.CLOSING:
            return
        bad = active.find_bad_blocks(message.checksums)
        if bad:
            self._memory.wipe(active.load.block_ids[index] for index in bad)
            self._finish(peer, active, Failure("corrupt", "a block's checksum is wrong"), num_good_blocks=bad[0])
        else:
            self._finish(peer, active, None)

    def _take_refused(self, peer: Peer, message: wire.Refused) -> None:
        active = peer.loads.get(message.transfer_id)
        if active is not None and active.phase in (Phase.OPENING, Phase.CLOSING):
            self._finish(peer, active, Failure(message.kind, message.reason))

    def _end_late(self, peer: Peer, active: ActiveLoad) -> None:
        failure = Failure("timeout", f"the producer did not answer within {self._timeout_s:g} s")
        if active.phase is Phase.CONNECTING or self._is_in_read(active):
            self._lose(peer, failure)
        else:
            self._abandon(peer, active, failure)

    def _is_in_read(self, active: ActiveLoad) -> bool:
        return self._read is not None and self._reading[0][1] is active

    def _abandon(self, peer: Peer, active: ActiveLoad, failure: Failure | None) -> None:
        """End a load that the producer does not know to have ended."""
        peer.channel.send(wire.Cancel(active.transfer_id))
        self._finish(peer, active, failure, is_whole=False)

    def _finish(
        self,
        peer: Peer,
        active: ActiveLoad,
        failure: Failure | None,
        *,
        num_good_blocks: int = 0,
        is_whole: bool = True,
    ) -> None:
        """The load has ended, and nothing is written to its blocks any more."""
        del self._loads[active.load.request_id]
        del peer.loads[active.transfer_id]
        with contextlib.suppress(ValueError):
            self._reading.remove((peer, active))
        self._end(active, failure, num_good_blocks=num_good_blocks, is_whole=is_whole)

    def _end(
        self, active: ActiveLoad, failure: Failure | None, *, num_good_blocks: int = 0, is_whole: bool = True
    ) -> None:
        load = active.load
        is_whole = is_whole and failure is None
        if is_whole:
            num_good_blocks = active.num_blocks
        elif not num_good_blocks:
            self._memory.wipe(load.block_ids[: active.num_started])
        if failure is not None:
            self._report.count_failure(failure.kind)
            self._warnings.warn(
                failure.kind,
                f"KV of request {load.request_id} could not be loaded from {load.reference.address}: "
                f"{failure.reason}; it is recomputed",
            )
        self._report.end_load(
            load.request_id,
            num_good_tokens=None if is_whole else active.count_good_tokens(num_good_blocks, self._block_size),
            num_blocks=num_good_blocks,
            num_bytes=num_good_blocks * self._memory.region.block_bytes,
            seconds=self._clock() - active.began_at,
        )
