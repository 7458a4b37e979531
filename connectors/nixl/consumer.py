"""The consumer's side: from a reference to verified blocks.

A load's way::

    start ──> CONNECTING ──> READING ──> CONFIRMING ──> verified, reported
                  │             │            │
                  └── refused, lost, late, cancelled ──> reported as failed, blocks wiped

Blocks count only when the producer has granted a lease that lasted until the last byte had come, and when every block's
checksum is the producer's: NIXL reports success for memory that was given to somebody else meanwhile. The producer is
asked when the read begins, so its answer is mostly there when the read ends, and nobody waits for it.

Lives on the transfer thread.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.connectors.base import ConnectorContext
from pdserve.connectors.blocks.failures import Failure, WarningLimiter
from pdserve.connectors.blocks.read_pace import ReadPace
from pdserve.connectors.nixl import wire
from pdserve.connectors.nixl.agent import RemotePool, TransferAgent, TransportError
from pdserve.connectors.nixl.loads import ActiveLoad, Ending, Phase
from pdserve.connectors.nixl.messages import Endpoint, Load, TransferReference
from pdserve.connectors.nixl.pool_memory import PoolMemory
from pdserve.connectors.nixl.producer import explain_difference
from pdserve.connectors.nixl.queued_transfers import QueuedTransfers
from pdserve.connectors.nixl.reads import ReadQueue
from pdserve.connectors.nixl.report import TransferReport

# Messages are heard so often while blocks are read.
_READING_S = 0.01


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
        context: the engine, and which rank of it this is: it reads from its counterpart.
        agent: connects to producers' pools.
        memory: the pool.
        report: told of each load's end.
        warnings: log lines for people.
        open_channel: connects to a producer; raises ValueError when its address is not one to connect to.
        timeout_s: longest wait for an answer, and for a piece of a read.
        clock: monotonic seconds.

    Attributes:
        pace: to be told of the engine's steps, by the forward thread.
    """

    def __init__(
        self,
        context: ConnectorContext,
        agent: TransferAgent,
        memory: PoolMemory,
        report: TransferReport,
        warnings: WarningLimiter,
        *,
        open_channel: Callable[[Endpoint], Channel],
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._identity = context.identity
        self._rank = context.rank.index
        self._agent = agent
        self._memory = memory
        self._report = report
        self._warnings = warnings
        self._open_channel = open_channel
        self.pace = ReadPace()
        self._timeout_s = timeout_s
        self._clock = clock
        self._read_again_at = -math.inf
        self._peers: dict[Endpoint, Peer] = {}
        self._loads: dict[str, tuple[Peer, ActiveLoad]] = {}
        self._queued = QueuedTransfers(clock)
        self._reads = ReadQueue(agent, memory, context.spec.block_size, timeout_s=timeout_s, clock=clock)

    # --- the engine's wishes ----------------------------------------------------------------------------------

    def keep(self, reference: TransferReference) -> None:
        """Give its producer signs of life until the transfer is loaded or released."""
        self._queued.add(reference)

    def start(self, load: Load) -> None:
        """Begin a load; one whose request has a load under way is refused and counted."""
        self._queued.remove(load.reference)
        if load.request_id in self._loads:
            self._report.count_failure("duplicate")
            return
        now = self._clock()
        active = ActiveLoad(load, began_at=now, deadline=now + self._timeout_s)
        try:
            peer = self._get_peer(load.reference)
        except ValueError as error:
            self._tell_end(active, Failure("foreign", str(error)), 0)
            return
        if active.transfer_id in peer.loads:
            self._tell_end(active, Failure("duplicate", "the transfer is being read already"), 0)
            return
        self._loads[load.request_id] = (peer, active)
        peer.loads[active.transfer_id] = active
        if peer.remote is not None:
            self._begin_reading(peer, peer.remote, active)

    def cancel(self, request_id: str) -> None:
        """The request has ended: end its load as soon as nothing is written to its blocks any more."""
        peer, active = self._loads.get(request_id, (None, None))
        if peer is not None and active is not None and active.phase is not Phase.CONFIRMING:
            self._end_early(peer, active, Ending(None, tells_producer=True))

    def release(self, reference: TransferReference) -> None:
        """Tell the producer that nobody will come for a transfer; if it cannot be told, its lease ends by itself."""
        self._queued.remove(reference)
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
            case wire.Refused(transfer_id=""):
                self._lose(peer, Failure(message.kind, message.reason))
            case wire.Refused():
                active = peer.loads.get(message.transfer_id)
                if active is not None:
                    failure = Failure(message.kind, message.reason)
                    self._end_early(peer, active, Ending(failure, tells_producer=False))

    def lose(self, producer: Endpoint, reason: str) -> None:
        """The connection to a producer broke."""
        peer = self._peers.get(producer)
        if peer is not None:
            self._lose(peer, Failure("disconnected", reason))

    # --- time -------------------------------------------------------------------------------------------------

    @property
    def wants_to_run(self) -> bool:
        """Whether `advance` has something to do at once, but for a pause between two pieces."""
        return bool(self._reads)

    @property
    def pause_s(self) -> float:
        """How much of that pause is left."""
        return max(self._read_again_at - self._clock(), 0.0)

    @property
    def is_waiting_for_word(self) -> bool:
        """Whether some load has all its bytes, and lacks the producer's word."""
        return any(active.phase is Phase.CONFIRMING for _, active in self._loads.values())

    @property
    def is_waiting_for_read(self) -> bool:
        """Whether a read goes on in the background."""
        return self._reads.is_in_background

    @property
    def next_due(self) -> float | None:
        """When `advance` must be called at the latest."""
        dues = [min(active.deadline, active.ask_at) for _, active in self._loads.values()]
        if self._queued.next_due is not None:
            dues.append(self._queued.next_due)
        return min(dues, default=None)

    def advance(self) -> None:
        """Go on reading; send signs of life; end what is late."""
        if self._reads and not self.pause_s:
            self._read_on()
        now = self._clock()
        for peer, active in list(self._loads.values()):
            if now >= active.deadline and active.load.request_id in self._loads:
                self._end_late(peer, active)
        for peer, active in self._loads.values():
            if now >= active.ask_at:
                self._ask(peer, active)
        self._extend_queued()

    def drop_all(self, reason: str) -> None:
        """Give everything up and disconnect. Reads that go on are stopped first. Idempotent."""
        for peer in list(self._peers.values()):
            self._lose(peer, Failure("disconnected", reason))

    # --- peers ------------------------------------------------------------------------------------------------

    def _get_peer(self, reference: TransferReference) -> Peer:
        """The producer that a reference is of; greeted when it is new.

        Raises:
            ValueError: the address is not one to connect to.
        """
        key = reference.producer
        peer = self._peers.get(key)
        if peer is None:
            peer = self._peers[key] = Peer(key, self._open_channel(key))
            peer.channel.send(wire.Hello(self._identity))
        return peer

    def _lose(self, peer: Peer, failure: Failure) -> None:
        """Forget a producer; its loads fail."""
        self._peers.pop(peer.key, None)
        for active in peer.loads.values():
            self._reads.remove(active)
        # Only when NIXL has dropped the connection is it certain that nothing is written to the blocks any more.
        if peer.remote is not None:
            self._agent.disconnect(peer.remote)
        for active in list(peer.loads.values()):
            self._finish(peer, active, failure)
        peer.channel.close()

    def _take_welcome(self, peer: Peer, message: wire.Welcome) -> None:
        failure: Failure | None = None
        if message.generation != peer.key.generation:
            failure = Failure("stale", "the producer has been restarted since")
        elif message.identity != self._identity:
            failure = Failure("foreign", explain_difference(self._identity, message.identity))
        elif message.rank != self._rank:
            failure = Failure("foreign", f"this is rank {self._rank}, there answers rank {message.rank}")
        elif message.memory.block_bytes != self._memory.region.block_bytes:
            failure = Failure("foreign", "the producer's blocks are of another size")
        elif peer.remote is None:
            try:
                peer.remote = self._agent.connect(message.agent, message.memory)
            except TransportError as error:
                failure = Failure(error.kind, error.reason)
        if failure is not None or peer.remote is None:
            self._lose(peer, failure or Failure("transport", "no connection"))
            return
        peer.num_blocks = message.memory.num_blocks
        for active in list(peer.loads.values()):
            if active.phase is Phase.CONNECTING:
                self._begin_reading(peer, peer.remote, active)

    def _extend_queued(self) -> None:
        """Signs of life of transfers that wait for their turn; one that is lost on the way is followed by others."""
        for references in self._queued.take_due():
            with contextlib.suppress(ValueError):
                transfer_ids = [reference.transfer_id for reference in references]
                self._get_peer(references[0]).channel.send(wire.Extend(transfer_ids))

    # --- one load ---------------------------------------------------------------------------------------------

    def _begin_reading(self, peer: Peer, remote: RemotePool, active: ActiveLoad) -> None:
        """Take the transfer, and read without waiting to hear whether it may be taken."""
        if not active.fits(self._memory.region.num_blocks, peer.num_blocks):
            self._finish(peer, active, Failure("foreign", "the reference names blocks that do not exist"))
            return
        self._ask(peer, active)
        active.phase = Phase.READING
        self._reads.add(active, remote)

    def _ask(self, peer: Peer, active: ActiveLoad) -> None:
        """Ask for the lease, or for more of it."""
        assert peer.remote is not None, "its blocks are being read"
        serial = active.ask(self._clock())
        peer.channel.send(wire.Open(active.transfer_id, active.load.digest, peer.remote.is_one_sided, serial))

    def _read_on(self) -> None:
        """Read for a moment: pieces of one load where each is a copy in memory, one look where it is on a network."""
        began = self._clock()
        while self._reads:
            active = self._reads.first
            peer, _ = self._loads[active.load.request_id]
            self.pace.begin_piece()
            try:
                has_piece = self._reads.advance()
            except TransportError as error:
                self._lose(peer, Failure(error.kind, error.reason))
                return
            if has_piece:
                self._take_piece(peer, active)
            now, pause_s = self._clock(), self.pace.get_pause_s()
            self._read_again_at = now + pause_s
            if not has_piece or active.is_read or pause_s or now - began >= _READING_S:
                return

    def _take_piece(self, peer: Peer, active: ActiveLoad) -> None:
        if active.ending is not None:
            self._end_early(peer, active, active.ending)
        elif active.is_read:
            self._reads.remove(active)
            active.phase = Phase.CONFIRMING
            active.read_at = self._clock()
            active.deadline = active.read_at + self._timeout_s
            self._confirm(peer, active)

    def _take_opened(self, peer: Peer, message: wire.Opened) -> None:
        active = peer.loads.get(message.transfer_id)
        if active is None:
            return  # the load was cancelled meanwhile
        if not active.take_answer(message.serial, message.lease_s, message.checksums):
            self._report.count_failure("protocol")
        elif active.phase is Phase.CONFIRMING:
            self._confirm(peer, active)

    def _confirm(self, peer: Peer, active: ActiveLoad) -> None:
        """Everything is read: end the load, if the lease lasted; otherwise ask whether it does."""
        if not active.was_held:
            if active.asked_at is None:
                self._ask(peer, active)
            return
        bad = active.find_bad_blocks()
        if bad:
            self._memory.wipe(active.load.block_ids[index] for index in bad)
            self._finish(peer, active, Failure("corrupt", "a block's checksum is wrong"), num_good_blocks=bad[0])
        else:
            self._finish(peer, active, None, num_good_blocks=active.num_blocks)
        peer.channel.send(wire.Close(active.transfer_id, active.num_blocks))

    def _end_late(self, peer: Peer, active: ActiveLoad) -> None:
        failure = Failure("timeout", f"the producer did not answer within {self._timeout_s:g} s")
        if active.phase is Phase.CONNECTING or self._reads.is_writing_to(active):
            self._lose(peer, failure)
        else:
            self._end_early(peer, active, Ending(failure, tells_producer=True))

    def _end_early(self, peer: Peer, active: ActiveLoad, ending: Ending) -> None:
        """End a load now, or when the piece that is on its way has come."""
        if self._reads.is_writing_to(active):
            active.ending = ending
            return
        if ending.tells_producer:
            peer.channel.send(wire.Cancel(active.transfer_id))
        self._finish(peer, active, ending.failure)

    def _finish(self, peer: Peer, active: ActiveLoad, failure: Failure | None, *, num_good_blocks: int = 0) -> None:
        """The load has ended, and nothing is written to its blocks any more."""
        del self._loads[active.load.request_id]
        del peer.loads[active.transfer_id]
        self._reads.remove(active)
        self._tell_end(active, failure, num_good_blocks)

    def _tell_end(self, active: ActiveLoad, failure: Failure | None, num_good_blocks: int) -> None:
        load = active.load
        if not num_good_blocks:
            self._memory.wipe(load.block_ids[: active.num_started])
        if failure is not None:
            self._report.count_failure(failure.kind)
            self._warnings.warn(
                failure.kind,
                f"KV of request {load.request_id} could not be loaded from {load.reference.address}: "
                f"{failure.reason}; it is recomputed",
            )
        is_whole = num_good_blocks == active.num_blocks
        num_good_tokens = min(num_good_blocks * self._identity.kv.block_size, load.num_tokens)
        self._report.end_load(
            load.request_id,
            num_good_tokens=None if is_whole else num_good_tokens,
            num_blocks=num_good_blocks,
            num_bytes=num_good_blocks * self._memory.region.block_bytes,
            seconds=self._clock() - active.began_at,
        )
