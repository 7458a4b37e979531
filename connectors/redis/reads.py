"""Reading: each value in pieces, asked for ahead, over several connections at once.

A value that does not fit a socket's buffer makes server and reader wait for each other: into a unix socket's 208 KiB
the server writes what there is room for, and sleeps until the reader has taken most of it. So a piece fits, and
neighbouring pieces come over different connections, the lanes: while the reader takes one, the server fills the
others. Values of two pieces::

    lane 0   block 0, first half    block 2, first half    block 4 …
    lane 1   block 0, second half   block 2, second half
    lane 2   block 1, first half    block 3, first half
    lane 3   block 1, second half   block 3, second half
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.connectors.blocks.block_format import HEADER_BYTES, BlockFormat
from pdserve.connectors.blocks.failures import Failure, InvalidBlockError
from pdserve.connectors.blocks.messages import BlockTransfer
from pdserve.connectors.redis.channel import Channel, Command
from pdserve.connectors.redis.keys import KeyNames
from pdserve.connectors.redis.server import Exchange
from pdserve.kv_layout import BlockKey

_NUM_LANES = 4
_MAX_PIECE_BYTES = 192 << 10
# Asked for and not read: enough to keep all lanes full, and no more copies in the server than its cache holds.
_AHEAD_BYTES = 3 << 20
_MISSING = Failure("missing", "the server does not have it any more")


class ValueReader:
    """Asks for values and verifies what comes. Holds no state; any thread may use it.

    Args:
        names: of the values.
        block_format: what a value must be.
        ttl: seconds that a value lives on once it was asked for; None = as before.

    Attributes:
        num_ahead: how many blocks to have asked for and not read.
    """

    def __init__(self, names: KeyNames, block_format: BlockFormat, ttl: bytes | None) -> None:
        self._names = names
        self._format = block_format
        self._ttl = ttl
        self._cuts = _cut(block_format.value_bytes)
        self._ranges = [(b"%d" % start, b"%d" % last) for start, last in self._cuts]
        self.num_ahead = max(_AHEAD_BYTES // block_format.value_bytes, 2)

    def ask(self, exchange: Exchange, blocks: Sequence[BlockTransfer], first: int) -> list[list[Channel]]:
        """Ask for values; for each, the channels that its pieces come from, for `read`.

        Args:
            exchange: where to ask.
            blocks: in the order in which they will be read.
            first: how many this exchange was asked for before.
        """
        commands: list[Command] = []
        lane = first * len(self._cuts) % _NUM_LANES
        for block in blocks:
            name = self._names.of(block.digest)
            if self._ttl is not None:
                commands.append(Command(b"EXPIRE", name, (self._ttl,), lane))
            for bounds in self._ranges:
                commands.append(Command(b"GETRANGE", name, bounds, lane))
                lane = (lane + 1) % _NUM_LANES
        channels = exchange.ask(commands)
        per_block = len(commands) // len(blocks)
        return [channels[start : start + per_block] for start in range(0, len(commands), per_block)]

    def read(self, channels: Sequence[Channel], key: BlockKey, payload: memoryview) -> Failure | None:
        """Read a value into ``payload`` and verify it; what it holds after a failure is of no use.

        The header is verified before the first payload byte is read: no other model's block touches KV memory.

        Raises:
            InvalidBlockError: the value is something else.
            ProtocolError: the server said what no server says.
            OSError: a connection broke, or the time is over.
        """
        if self._ttl is not None:
            renewed, *channels = channels
            renewed.read_number()  # a server that refuses this, a replica for example, may give the value all the same
        header = b""
        for channel, (start, last) in zip(channels, self._cuts, strict=True):
            length = channel.read_value_length()
            if isinstance(length, Failure):
                return length
            if length == 0:
                return _MISSING
            size = min(last, self._format.value_bytes - 1) + 1 - start
            if start == 0:
                header = _read_header(channel, length)
                num_bytes = self._format.value_bytes if length == size else length
                self._format.verify_header(key, header, num_bytes)
            if length != size:
                raise InvalidBlockError("truncated" if length < size else "corrupt")
            channel.read_into(payload[max(start - HEADER_BYTES, 0) : start + size - HEADER_BYTES])
            channel.end_value()
        self._format.verify_payload(header, payload)
        return None


def _read_header(channel: Channel, length: int) -> bytes:
    header = bytearray(min(length, HEADER_BYTES))
    channel.read_into(memoryview(header))
    return bytes(header)


def _cut(value_bytes: int) -> list[tuple[int, int]]:
    """First and last byte of each piece; the last one ends a byte late, so that a value that is too long shows."""
    num_pieces = -(-value_bytes // _MAX_PIECE_BYTES)
    starts = [value_bytes * index // num_pieces for index in range(num_pieces)]
    return list(zip(starts, [start - 1 for start in starts[1:]] + [value_bytes], strict=True))
