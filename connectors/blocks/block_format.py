"""A stored block, header in front, and its verification: the same bytes in a file and in a server's value.

::

    offset  bytes  field
         0      8  magic
         8      4  format version        little-endian, like all numbers
        12      4  num_tokens            fewer than the block size in a prompt's last block
        16     16  key digest            identity of the content
        32     16  model fingerprint
        48     16  digest of the block's shape and dtype, and of the rank where there are several
        64      8  payload length
        72      8  xxh3_64 over the 72 bytes above and the payload
        80         payload: the block as it lies in KV memory; slots behind num_tokens are zero

Every field is known to the reader beforehand, so a header is right or it is not; nothing in it is believed.
"""

from __future__ import annotations

import hashlib
import struct

import msgspec
import xxhash

from pdserve.connectors.blocks.failures import InvalidBlockError
from pdserve.kv_layout import DIGEST_BYTES, BlockKey, KVCacheSpec, ModelIdentity, Rank

MAGIC = b"PDSKVBLK"
FORMAT_VERSION = 1
_FIELDS = struct.Struct("<8sII16s16s16sQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size
_ONLY_RANK = Rank()


class BlockFormat:
    """Seals and verifies one rank's share of a model's blocks. Holds no state; any thread may use it.

    A value is header and payload in one piece.

    Args:
        identity: the model's, the same in all ranks.
        spec: shape of the rank's share.
        rank: whose; another one's share is foreign, though its key and shape are the same.
    """

    def __init__(self, identity: ModelIdentity, spec: KVCacheSpec, rank: Rank = _ONLY_RANK) -> None:
        self.payload_bytes = spec.block_bytes
        self.value_bytes = HEADER_BYTES + spec.block_bytes
        self._fingerprint = bytes.fromhex(identity.fingerprint)
        layout = msgspec.json.encode(spec, order="sorted") + rank.label.encode()
        self._layout = hashlib.sha256(layout).digest()[:DIGEST_BYTES]

    def seal(self, key: BlockKey, value: memoryview) -> None:
        """Write the header in front of the payload.

        Args:
            key: what the payload is.
            value: ``value_bytes`` contiguous bytes whose payload is in place.
        """
        checksum = self.start_checksum(key)
        checksum.update(value[HEADER_BYTES:])
        value[:HEADER_BYTES] = self.build_header(key, checksum)

    def start_checksum(self, key: BlockKey) -> xxhash.xxh3_64:
        """A checksum that wants the payload, in any number of pieces in their order; for `build_header`."""
        return xxhash.xxh3_64(self._pack_fields(key))

    def build_header(self, key: BlockKey, checksum: xxhash.xxh3_64) -> bytes:
        """The header of the payload that ``checksum`` has seen."""
        return self._pack_fields(key) + _CHECKSUM.pack(checksum.intdigest())

    def verify_header(self, key: BlockKey, header: bytes, num_bytes: int) -> None:
        """Whether this may be ``key``'s block, before its payload is looked at.

        Args:
            key: what must be there.
            header: the first ``HEADER_BYTES``, or what there is.
            num_bytes: length of the whole value.

        Raises:
            InvalidBlockError: it is anything else.
        """
        if len(header) < HEADER_BYTES:
            raise InvalidBlockError("truncated")
        if not header.startswith(MAGIC):
            raise InvalidBlockError("corrupt")
        if not header.startswith(self._pack_fields(key)):
            raise InvalidBlockError("foreign")
        if num_bytes != self.value_bytes:
            raise InvalidBlockError("truncated" if num_bytes < self.value_bytes else "corrupt")

    def verify_payload(self, header: bytes, payload: memoryview) -> None:
        """Whether the payload is the one that the verified ``header`` was written for.

        Raises:
            InvalidBlockError: it is not.
        """
        if header[_FIELDS.size :] != _CHECKSUM.pack(_checksum(header[: _FIELDS.size], payload)):
            raise InvalidBlockError("corrupt")

    def _pack_fields(self, key: BlockKey) -> bytes:
        return _FIELDS.pack(
            MAGIC,
            FORMAT_VERSION,
            key.num_tokens,
            key.digest,
            self._fingerprint,
            self._layout,
            self.payload_bytes,
        )


def _checksum(fields: bytes, payload: memoryview) -> int:
    state = xxhash.xxh3_64(fields)
    state.update(payload)
    return int(state.intdigest())
