"""What every test starts with."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def untouched_logging() -> None:
    """What an earlier test configured, as a process does at its start, says nothing about this one's log."""
    logger = logging.getLogger("pdserve")
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
