from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from pdserve.ready_file import write_ready_file


def test_the_note_is_there_as_a_whole_and_nothing_beside_it(tmp_path: Path) -> None:
    for port in (1, 2):
        write_ready_file(tmp_path / "ready.json", {"port": port})
        assert json.loads((tmp_path / "ready.json").read_text()) == {"port": port}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    path = tmp_path / "none" / "ready.json"
    with pytest.raises(ConfigError) as caught:
        write_ready_file(path, {})
    assert caught.value.message == f"--ready-file {path}: No such file or directory"
