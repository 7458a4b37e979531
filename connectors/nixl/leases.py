"""Who may read which of the producer's blocks, and until when.

Pure bookkeeping on a monotonic clock: no sockets, no threads, no memory. A lease begins with the offer and ends
exactly once: closed by its consumer, cancelled, or expired.

::

    offer ──> waiting ──open──> being read ──close──> ended
               │ ^ └──cancel──────┤ ^ └──cancel──> ended
               │ └─extend         │ └─open
               └───────expire─────┴──────────────> ended, counted as expired
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdserve.connectors.nixl.messages import Offer


class LeaseError(Exception):
    """A consumer asks for what it cannot have.

    Args:
        kind: ``stale`` (another incarnation's), ``unknown``, ``expired`` (ended in any way), ``in_use`` or ``foreign``.
        reason: for people.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


class LeasePendingError(Exception):
    """The transfer may be one that is still to be announced: ask again when one has been."""


@dataclass(slots=True, eq=False)
class Lease:
    """Blocks that wait for a consumer or are being read.

    Attributes:
        offer: what is lent.
        expires_at: by the table's clock.
        reader: the consumer that opened it.
        is_one_sided: the reader needs nothing from this side while it reads.
    """

    offer: Offer
    expires_at: float
    reader: bytes | None = None
    is_one_sided: bool = False


def build_transfer_id(generation: str, serial: int, nonce: str) -> str:
    """Name of a transfer: never used twice, and not to be guessed.

    The serial number tells a transfer that is still to be announced from one that has ended.
    """
    return f"{generation}#{serial}-{nonce}"


def translate_transfer_id(transfer_id: str, generation: str) -> str:
    """A transfer's name in another rank of the producer: all of them lend their share under the same serial number."""
    _, _, rest = transfer_id.rpartition("#")
    return f"{generation}#{rest}"


def read_serial(transfer_id: str, generation: str) -> int:
    """The serial number in a transfer's name.

    Raises:
        LeaseError: another incarnation of the producer made the name, or nobody did.
    """
    owner, _, rest = transfer_id.rpartition("#")
    serial, _, _ = rest.partition("-")
    if owner != generation:
        raise LeaseError("stale", "the producer that offered it has been restarted since")
    if not serial.isascii() or not serial.isdigit():
        raise LeaseError("unknown", "no such transfer was offered")
    return int(serial)


class LeaseTable:
    """The leases of one incarnation of a producer. One thread owns it.

    Args:
        generation: the incarnation.
        lease_s: how long blocks wait for a sign of life.
        clock: monotonic seconds.
    """

    def __init__(self, generation: str, lease_s: float, clock: Callable[[], float]) -> None:
        self._generation = generation
        self.lease_s = lease_s
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        self._last_serial = -1

    def __len__(self) -> int:
        return len(self._leases)

    @property
    def is_read(self) -> bool:
        """Whether some consumer reads now."""
        return any(lease.reader is not None for lease in self._leases.values())

    @property
    def needs_progress(self) -> bool:
        """Whether some consumer reads now, and needs this side for it."""
        return any(lease.reader is not None and not lease.is_one_sided for lease in self._leases.values())

    @property
    def next_expiry(self) -> float | None:
        """When the next lease ends if nothing is heard; None without leases."""
        return min((lease.expires_at for lease in self._leases.values()), default=None)

    def add(self, offer: Offer) -> Lease:
        """Begin a lease; offers come in the order of their serial numbers."""
        self._last_serial = read_serial(offer.transfer_id, self._generation)
        lease = Lease(offer, self._clock() + self.lease_s)
        self._leases[offer.transfer_id] = lease
        return lease

    def open(self, transfer_id: str, digest: bytes, reader: bytes, *, is_one_sided: bool = False) -> Lease:
        """A consumer takes the transfer, or keeps it; the lease starts anew.

        Args:
            transfer_id: which.
            digest: identity of the prompt that the consumer wants.
            reader: who it is.
            is_one_sided: it needs nothing from this side while it reads.

        Raises:
            LeaseError: there is no such lease, it is somebody else's, or it is of another prompt.
            LeasePendingError: it may come yet.
        """
        lease = self._get_live(transfer_id)
        if lease.reader not in (None, reader):
            raise LeaseError("in_use", "the transfer is being read already")
        if lease.offer.digest != digest:
            raise LeaseError("foreign", "the transfer is of another prompt")
        lease.reader, lease.is_one_sided = reader, is_one_sided
        lease.expires_at = self._clock() + self.lease_s
        return lease

    def extend(self, transfer_id: str, reader: bytes) -> None:
        """A sign of life of who will be a lease's reader, or is: the lease starts anew.

        Ignored when somebody else reads, and when it comes too late.
        """
        lease = self._leases.get(transfer_id)
        now = self._clock()
        if lease is not None and lease.reader in (None, reader) and now < lease.expires_at:
            lease.expires_at = now + self.lease_s

    def get_read(self, transfer_id: str, reader: bytes) -> Lease:
        """The lease that ``reader`` has been reading, alive to this moment.

        Raises:
            LeaseError: it ended meanwhile, or never was this reader's.
            LeasePendingError: it may come yet.
        """
        lease = self._get_live(transfer_id)
        if lease.reader != reader:
            raise LeaseError("in_use", "the transfer is not this consumer's")
        return lease

    def cancel(self, transfer_id: str, reader: bytes) -> Lease:
        """End a lease that nobody else reads.

        Raises:
            LeaseError: there is none.
            LeasePendingError: it may come yet.
        """
        lease = self._get_live(transfer_id)
        if lease.reader not in (None, reader):
            raise LeaseError("in_use", "the transfer is not this consumer's")
        return self.end(lease)

    def holds(self, lease: Lease) -> bool:
        """Whether ``lease`` has not ended."""
        return self._leases.get(lease.offer.transfer_id) is lease

    def find_request(self, request_id: str) -> Lease | None:
        """The lease on this request's blocks."""
        return next((lease for lease in self._leases.values() if lease.offer.request_id == request_id), None)

    def end(self, lease: Lease) -> Lease:
        """The lease ends now."""
        del self._leases[lease.offer.transfer_id]
        return lease

    def take_expired(self) -> list[Lease]:
        """End every lease whose time has come."""
        now = self._clock()
        expired = [lease for lease in self._leases.values() if now >= lease.expires_at]
        for lease in expired:
            self.end(lease)
        return expired

    def _get_live(self, transfer_id: str) -> Lease:
        lease = self._leases.get(transfer_id)
        if lease is None and read_serial(transfer_id, self._generation) > self._last_serial:
            raise LeasePendingError
        if lease is None or self._clock() >= lease.expires_at:
            raise LeaseError("expired", "the transfer has ended: taken, cancelled or not fetched in time")
        return lease
