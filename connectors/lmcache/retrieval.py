"""One batch of blocks on its way from LMCache's memory into KV memory; may be given up at any moment."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from pdserve.connectors.blocks.block_format import HEADER_BYTES, BlockFormat
from pdserve.connectors.blocks.block_memory import BlockMemory
from pdserve.connectors.blocks.failures import Failure, InvalidBlockError
from pdserve.connectors.blocks.messages import BlockTransfer

_NOT_RETRIEVED = Failure("missing", "LMCache does not have it any more, or could not read it")


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """``target[:] = source``, without Python's lock: readers copy side by side, and the forward thread goes on."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


class Retrieval:
    """LMCache's thread puts values in; the reader thread takes the outcome, or gives up.

    Args:
        blocks: what is asked for, in order.
        memory: where it goes.
        block_format: verifies it.
    """

    def __init__(self, blocks: Sequence[BlockTransfer], memory: BlockMemory, block_format: BlockFormat) -> None:
        self._blocks = blocks
        self._memory = memory
        self._format = block_format
        self._lock = threading.Lock()
        self._is_abandoned = False
        self._outcomes: list[Failure | None] = [_NOT_RETRIEVED] * len(blocks)

    def put(self, index: int, value: memoryview) -> None:
        """Block ``index`` has come: verify it, then copy it. Nothing is written once the retrieval is given up."""
        block = self._blocks[index]
        try:
            self._verify(block, value)
        except InvalidBlockError as error:
            self._outcomes[index] = Failure(error.kind, f"its value is {error.kind}")
            return
        with self._lock:
            if self._is_abandoned:
                return
            copy_bytes(value[HEADER_BYTES:], self._memory.get_view(block.block_id))
            self._outcomes[index] = None

    def abandon(self) -> None:
        """Give up: when this returns, KV memory is written to no more."""
        with self._lock:
            self._is_abandoned = True

    def get_outcomes(self) -> list[Failure | None]:
        """Why each block did not come, or None."""
        with self._lock:
            return list(self._outcomes)

    def _verify(self, block: BlockTransfer, value: memoryview) -> None:
        header = bytes(value[:HEADER_BYTES])
        self._format.verify_header(block.key, header, len(value))
        self._format.verify_payload(header, value[HEADER_BYTES:])
