"""The file by which a process that has just come up tells where it listens."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdserve.errors import ConfigError


def write_ready_file(path: Path, note: Mapping[str, Any]) -> None:
    """Write the note as JSON; a reader sees all of it or nothing.

    Raises:
        ConfigError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(note), encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"--ready-file {path}: {error.strerror}") from None
