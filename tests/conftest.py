"""What every test starts with."""

from __future__ import annotations

import logging
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # Kernels of GPUs run in Triton's interpreter then; it looks when it is imported.
    os.environ["TRITON_INTERPRET"] = "1"

# How long an example takes is the machine's affair. All else stays, also what Hypothesis itself sets in CI.
settings.register_profile("any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_machine")


@pytest.fixture(autouse=True)
def untouched_logging() -> None:
    """What an earlier test configured, as a process does at its start, says nothing about this one's log."""
    logger = logging.getLogger("pdserve")
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
