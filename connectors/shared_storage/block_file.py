"""The format of one stored block, and the only code that reads or writes it.

::

    offset  bytes  field
         0      8  magic
         8      4  format version        little-endian, like all numbers
        12      4  num_tokens            fewer than the block size in a prompt's last block
        16     16  key digest            identity of the content
        32     16  model fingerprint
        48     16  digest of the block's shape and dtype
        64      8  payload length
        72      8  xxh3_64 over the 72 bytes above and the payload
        80         payload: the block as it lies in KV memory; slots behind num_tokens are zero

Every field is known to the reader beforehand, so a header is right or it is not; nothing in it is believed.
"""

from __future__ import annotations

import hashlib
import os
import struct

import msgspec
import xxhash

from pdserve.kv_layout import DIGEST_BYTES, BlockKey, KVCacheSpec, ModelIdentity

MAGIC = b"PDSKVBLK"
FORMAT_VERSION = 1
_FIELDS = struct.Struct("<8sII16s16s16sQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _CHECKSUM.size


class InvalidBlockError(Exception):
    """A file is not the block that its name promises.

    Args:
        kind: ``truncated``, ``foreign`` (another model, layout, key or format) or ``corrupt``.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.kind = kind


class BlockFormat:
    """Reads and writes the files of one model and one block shape. Holds no state; any thread may use it."""

    def __init__(self, identity: ModelIdentity, spec: KVCacheSpec) -> None:
        self.payload_bytes = spec.block_bytes
        self.file_bytes = HEADER_BYTES + spec.block_bytes
        self._fingerprint = bytes.fromhex(identity.fingerprint)
        self._layout = hashlib.sha256(msgspec.json.encode(spec, order="sorted")).digest()[:DIGEST_BYTES]

    def write(self, fd: int, key: BlockKey, payload: memoryview) -> None:
        """Write the whole file to an empty ``fd``.

        Args:
            fd: open for writing.
            key: what the payload is.
            payload: ``payload_bytes`` contiguous bytes.

        Raises:
            OSError: the disk is full, a limit was hit, or the device failed.
        """
        fields = self._pack_fields(key)
        header = fields + _CHECKSUM.pack(_checksum(fields, payload))
        _write_all(fd, [memoryview(header), payload])

    def read(self, fd: int, key: BlockKey, payload: memoryview) -> None:
        """Read the file into ``payload`` and verify all of it.

        The header is verified before the first payload byte is read, so another model's block never touches KV
        memory; a payload with a wrong checksum has touched it, and the caller wipes it.

        Args:
            fd: open for reading.
            key: what the file must hold.
            payload: ``payload_bytes`` contiguous writable bytes.

        Raises:
            InvalidBlockError: the file holds anything else.
            OSError: it could not be read.
        """
        file_bytes = os.fstat(fd).st_size
        header = os.pread(fd, HEADER_BYTES, 0)
        fields = header[: _FIELDS.size]
        self._verify_header(header, self._pack_fields(key))
        if file_bytes != self.file_bytes:
            raise InvalidBlockError("truncated" if file_bytes < self.file_bytes else "corrupt")
        _read_all(fd, payload, HEADER_BYTES)
        if header[_FIELDS.size :] != _CHECKSUM.pack(_checksum(fields, payload)):
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

    @staticmethod
    def _verify_header(header: bytes, expected: bytes) -> None:
        if len(header) < HEADER_BYTES:
            raise InvalidBlockError("truncated")
        if not header.startswith(MAGIC):
            raise InvalidBlockError("corrupt")
        if not header.startswith(expected):
            raise InvalidBlockError("foreign")


def _checksum(fields: bytes, payload: memoryview) -> int:
    state = xxhash.xxh3_64(fields)
    state.update(payload)
    return int(state.intdigest())


def _write_all(fd: int, parts: list[memoryview]) -> None:
    while parts:
        written = os.writev(fd, parts)
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][written:]


def _read_all(fd: int, target: memoryview, offset: int) -> None:
    while target:
        count = os.preadv(fd, [target], offset)
        if count == 0:
            raise InvalidBlockError("truncated")
        target, offset = target[count:], offset + count
