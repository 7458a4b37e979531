"""Blocks as another version of the format has them: whole and sealed, and not to be read by this one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from unittest import mock

from pdserve.connectors.blocks import block_format


def other_block_format() -> AbstractContextManager[object]:
    """What is sealed inside has the next version's number."""
    return mock.patch.object(block_format, "FORMAT_VERSION", block_format.FORMAT_VERSION + 1)
