"""One stored block in one file: nothing but the value, and read straight into KV memory."""

from __future__ import annotations

import os

from pdserve.connectors.blocks.block_format import HEADER_BYTES, BlockFormat
from pdserve.connectors.blocks.failures import InvalidBlockError
from pdserve.kv_layout import BlockKey


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` from ``offset`` on.

    Raises:
        OSError: the disk is full, a limit was hit, or the device failed.
    """
    while data:
        num_written = os.pwrite(fd, data, offset)
        data, offset = data[num_written:], offset + num_written


def read_block(fd: int, file_bytes: int, block_format: BlockFormat, key: BlockKey, payload: memoryview) -> None:
    """Read the file into ``payload`` and verify all of it.

    What is there is read before it is verified: a file may be written over at any time, for another block. So other
    bytes may have touched ``payload`` when this fails, and the caller wipes it.

    Args:
        fd: open for reading.
        file_bytes: the file's size.
        block_format: the model's.
        key: what the file must hold.
        payload: one block's contiguous writable bytes.

    Raises:
        InvalidBlockError: the file holds anything else.
        OSError: it could not be read.
    """
    header = bytearray(HEADER_BYTES)
    num_read = _read_all(fd, memoryview(header), payload)
    block_format.verify_header(key, bytes(header[:num_read]), file_bytes)
    if num_read < HEADER_BYTES + len(payload):
        raise InvalidBlockError("truncated")
    block_format.verify_payload(bytes(header), payload)


def _read_all(fd: int, header: memoryview, payload: memoryview) -> int:
    """Fill both from the file's start, with one call if the system gives all at once; how many bytes there were."""
    num_read = count = os.preadv(fd, [header, payload], 0)
    while count and num_read < len(header) + len(payload):
        behind = num_read - len(header)
        rest = [header[behind:], payload] if behind < 0 else [payload[behind:]]
        count = os.preadv(fd, rest, num_read)
        num_read += count
    return num_read
