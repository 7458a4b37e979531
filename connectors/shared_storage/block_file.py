"""One stored block in one file: nothing but the value, and read straight into KV memory."""

from __future__ import annotations

import os

from pdserve.connectors.blocks.block_format import HEADER_BYTES, BlockFormat
from pdserve.connectors.blocks.failures import InvalidBlockError
from pdserve.kv_layout import BlockKey


def write_all(fd: int, data: memoryview) -> None:
    """Write all of ``data`` where ``fd`` stands.

    Raises:
        OSError: the disk is full, a limit was hit, or the device failed.
    """
    while data:
        data = data[os.writev(fd, [data]) :]


def read_block(fd: int, block_format: BlockFormat, key: BlockKey, payload: memoryview) -> None:
    """Read the file into ``payload`` and verify all of it.

    The header is verified before the first payload byte is read, so another model's block never touches KV
    memory; a payload with a wrong checksum has touched it, and the caller wipes it.

    Args:
        fd: open for reading.
        block_format: the model's.
        key: what the file must hold.
        payload: one block's contiguous writable bytes.

    Raises:
        InvalidBlockError: the file holds anything else.
        OSError: it could not be read.
    """
    file_bytes = os.fstat(fd).st_size
    header = os.pread(fd, HEADER_BYTES, 0)
    block_format.verify_header(key, header, file_bytes)
    _read_all(fd, payload, HEADER_BYTES)
    block_format.verify_payload(header, payload)


def _read_all(fd: int, target: memoryview, offset: int) -> None:
    while target:
        count = os.preadv(fd, [target], offset)
        if count == 0:
            raise InvalidBlockError("truncated")
        target, offset = target[count:], offset + count
