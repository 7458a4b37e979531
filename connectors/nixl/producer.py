"""The producer's side: offers, leases, and answers to consumers.

Lives on the transfer thread; sockets are somebody else's. Checksums are taken between other things, the last ones from
the moment of the offer, while the consumer is on its way; it is told of them when it has opened the transfer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from pdserve.connectors.blocks.failures import WarningLimiter
from pdserve.connectors.nixl import wire
from pdserve.connectors.nixl.checksums import PromptChecksums
from pdserve.connectors.nixl.leases import Lease, LeaseError, LeasePendingError, LeaseTable
from pdserve.connectors.nixl.messages import FilledBlocks, Offer
from pdserve.connectors.nixl.pool_memory import PoolMemory
from pdserve.connectors.nixl.report import TransferReport
from pdserve.kv_layout import ModelIdentity

_PATIENCE_S = 2.0
"""How long a message about a transfer may wait for the step that announces it to this half."""
_ATTENTION_S = 2.0
"""After a message of a consumer that needs it the agent is kept going: NIXL's first connection, and reads over a
network, need both ends."""
_READ_INTERVAL_S = 0.0001
_CONNECT_INTERVAL_S = 0.001
_MAX_EARLY_MESSAGES = 4096
_MAX_REASON_CHARS = 500
_NEVER_OFFERED = "no such transfer was offered"

TransferMessage = wire.Open | wire.Close | wire.Cancel

Reply = Callable[[bytes, wire.ProducerMessage], None]


class Producer:
    """Holds blocks for consumers and tells them what they need.

    Args:
        welcome: answers a consumer of the same model.
        leases: the book.
        memory: the pool.
        report: told of each sending's end.
        warnings: log lines for people.
        reply: sends a message to a consumer.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        welcome: wire.Welcome,
        leases: LeaseTable,
        memory: PoolMemory,
        report: TransferReport,
        warnings: WarningLimiter,
        *,
        reply: Reply,
        clock: Callable[[], float],
    ) -> None:
        self._welcome = welcome
        self._leases = leases
        self._memory = memory
        self._report = report
        self._warnings = warnings
        self._reply = reply
        self._clock = clock
        self._prompt_checksums = PromptChecksums(memory, report.count_save_time)
        self._checksums: dict[str, bytes] = {}
        """Of each transfer, as soon as they are known."""
        self._unanswered: dict[str, int] = {}
        """Transfers that were opened, and whose checksums are still to come: the last question's serial number."""
        self._attentive_until = float("-inf")
        self._early: list[tuple[float, bytes, TransferMessage]] = []

    # --- the engine's wishes --------------------------------------------------------------------------------

    def fill(self, filled: FilledBlocks) -> None:
        """These blocks will be offered when the rest of their prompt is computed."""
        self._prompt_checksums.add(filled.request_id, filled.first_block, filled.block_ids)

    def forget(self, request_id: str) -> None:
        """They will not: the request was preempted, or has ended."""
        self._prompt_checksums.forget(request_id)

    def offer(self, offer: Offer) -> None:
        """Hold a request's blocks until a consumer has them, or none came in time."""
        take = functools.partial(self._take_checksums, self._leases.add(offer))
        self._prompt_checksums.finish(offer.request_id, offer.block_ids, take)
        early, self._early = self._early, []
        for _, reader, message in early:
            self.receive(reader, message)

    def cancel_request(self, request_id: str) -> None:
        """No consumer will come for this request; one that reads already finds its lease ended."""
        lease = self._leases.find_request(request_id)
        if lease is not None:
            self._end(self._leases.end(lease), ok=False)

    # --- consumers' messages ---------------------------------------------------------------------------------

    def receive(self, reader: bytes, message: wire.ConsumerMessage) -> None:
        """Answer one message of the consumer that ``reader`` names."""
        match message:
            case wire.Hello():
                self._attend()
                self._greet(reader, message)
            case wire.Extend():
                for transfer_id in message.transfer_ids:
                    self._leases.extend(transfer_id, reader)
            case wire.Open() | wire.Close() | wire.Cancel():
                self._handle(reader, message)

    # --- time ------------------------------------------------------------------------------------------------

    @property
    def progress_interval_s(self) -> float | None:
        """How often the agent must be kept going; None = not at all.

        Often while a consumer reads over a network, for then it is this side that sends. Now and then while one may be
        connecting, or reading something that it is just being refused, or has been silent for a while; and beside reads
        between processes of one machine: mostly they do without, but one that follows UCX's question whether this side
        lives, which comes every 20 s, waits for the answer.
        """
        is_attentive = self._clock() < self._attentive_until
        if is_attentive and self._leases.needs_progress:
            return _READ_INTERVAL_S
        return _CONNECT_INTERVAL_S if is_attentive or self._leases.is_read else None

    @property
    def next_due(self) -> float | None:
        """When `advance` must be called at the latest."""
        if self._prompt_checksums:
            return self._clock()
        times = [deadline for deadline, _, _ in self._early]
        if self._leases.next_expiry is not None:
            times.append(self._leases.next_expiry)
        return min(times, default=None)

    def advance(self) -> None:
        """End what has waited long enough, and go on with checksums."""
        for lease in self._leases.take_expired():
            self._report.count_failure("expired")
            self._warnings.warn(
                "expired",
                f"KV of request {lease.offer.request_id} was not fetched within {self._leases.lease_s:g} s; its "
                "blocks are freed",
            )
            self._end(lease, ok=False)
        now = self._clock()
        late = [entry for entry in self._early if now >= entry[0]]
        self._early = [entry for entry in self._early if now < entry[0]]
        for _, reader, message in late:
            self._refuse(reader, message.transfer_id, "unknown", _NEVER_OFFERED)
        self._prompt_checksums.advance()

    # --- parts -----------------------------------------------------------------------------------------------

    def _greet(self, reader: bytes, message: wire.Hello) -> None:
        if message.version != wire.WIRE_VERSION:
            reason = f"protocol version {message.version} there, {wire.WIRE_VERSION} here"
            self._refuse(reader, "", "foreign", reason)
        elif message.identity != self._welcome.identity:
            self._refuse(reader, "", "foreign", explain_difference(message.identity, self._welcome.identity))
        else:
            self._reply(reader, self._welcome)

    def _handle(self, reader: bytes, message: TransferMessage) -> None:
        """Do what a message about one transfer says, now or when the transfer is announced."""
        try:
            match message:
                case wire.Open():
                    self._open(reader, message)
                case wire.Close():
                    lease = self._leases.get_read(message.transfer_id, reader)
                    num_bytes = message.num_blocks * self._memory.region.block_bytes
                    self._report.count_saved(message.num_blocks, num_bytes)
                    self._end(self._leases.end(lease), ok=True, num_bytes=num_bytes)
                case wire.Cancel():
                    self._end(self._leases.cancel(message.transfer_id, reader), ok=True)
        except LeaseError as error:
            if not isinstance(message, wire.Cancel):
                self._refuse(reader, message.transfer_id, error.kind, error.reason)
        except LeasePendingError:
            if len(self._early) < _MAX_EARLY_MESSAGES:
                self._early.append((self._clock() + _PATIENCE_S, reader, message))
            else:
                self._refuse(reader, message.transfer_id, "unknown", _NEVER_OFFERED)

    def _open(self, reader: bytes, message: wire.Open) -> None:
        lease = self._leases.open(message.transfer_id, message.digest, reader, is_one_sided=message.is_one_sided)
        if not message.is_one_sided:
            self._attend()
        self._unanswered[message.transfer_id] = message.serial
        self._answer(lease)

    def _attend(self) -> None:
        self._attentive_until = self._clock() + _ATTENTION_S

    def _answer(self, lease: Lease) -> None:
        """Tell the lease's reader that it is its own, if it waits to hear that and the checksums are known."""
        transfer_id = lease.offer.transfer_id
        checksums = self._checksums.get(transfer_id)
        if checksums is not None and lease.reader is not None and transfer_id in self._unanswered:
            serial = self._unanswered.pop(transfer_id)
            self._reply(lease.reader, wire.Opened(transfer_id, self._leases.lease_s, checksums, serial))

    def _end(self, lease: Lease, *, ok: bool, num_bytes: int = 0) -> None:
        if lease.reader is not None and not ok:
            self._refuse(lease.reader, lease.offer.transfer_id, "expired", "the lease has ended")
        self._unanswered.pop(lease.offer.transfer_id, None)
        self._checksums.pop(lease.offer.transfer_id, None)
        self._report.end_sending(lease.offer.request_id, ok=ok, num_bytes=num_bytes)

    def _refuse(self, reader: bytes, transfer_id: str, kind: str, reason: str) -> None:
        self._report.count_failure(f"refused_{kind}")
        if kind == "foreign":
            # A part of the reason is the consumer's own words.
            self._warnings.warn("refused", f"a consumer of KV was refused: {reason[:_MAX_REASON_CHARS]!r}")
        self._reply(reader, wire.Refused(transfer_id, kind, reason))

    def _take_checksums(self, lease: Lease, checksums: bytes) -> None:
        """A lease that has ended meanwhile makes them worthless, and they are dropped."""
        if self._leases.holds(lease):
            self._checksums[lease.offer.transfer_id] = checksums
            self._answer(lease)


def explain_difference(consumer: ModelIdentity, producer: ModelIdentity) -> str:
    """Why KV of one model is of no use to the other, for people."""
    return f"the engines differ: {consumer.explain_difference(producer)} (here the consumer, there the producer)"
