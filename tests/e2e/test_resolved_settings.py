"""What an engine makes of settings that were left open."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pd_pair import build_core

sys.path.insert(0, str(Path(__file__).parent.parent / "soak"))

from tiny_model import build_tiny_model


@pytest.mark.parametrize(("asked", "expected"), [(None, "model-of-mine"), ("other", "other")])
def test_a_model_is_served_as_asked_or_under_its_own_name(asked: str | None, expected: str, tmp_path: Path) -> None:
    directory = tmp_path / "model-of-mine"
    directory.mkdir()
    core = build_core(model=str(build_tiny_model(directory)), served_model_name=asked, num_blocks=64)
    try:
        assert core.model_name == expected
        assert core.config.model.max_model_len == core.limits.max_model_len
    finally:
        core.close()
