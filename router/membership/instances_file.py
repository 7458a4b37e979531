"""The list of instances in a TOML file.

It looks like this::

prefill = ["10.0.0.5:8100"]
decode = ["10.0.0.6:8200", "10.0.0.7:8200"]
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pdserve.protocol import Role
from pdserve.router.membership.directory import DirectoryError, Members


class InstancesFile:
    """One file. Writers should replace it by renaming; one that is caught half written is read again.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Members:
        """The lists in the file.

        Raises:
            DirectoryError: it cannot be read, is no TOML, or holds something else.
        """
        try:
            content = tomllib.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise DirectoryError(f"{self._path}: {error}") from None
        unknown = sorted(content.keys() - set(Role))
        if unknown:
            raise DirectoryError(f"{self._path}: {unknown[0]!r} is unknown; the lists are called prefill and decode")
        return {role: self._read_list(role, content.get(role, [])) for role in Role}

    def close(self) -> None:
        """Nothing is held."""

    def _read_list(self, role: Role, value: Any) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise DirectoryError(f"{self._path}: {role} must be a list of strings HOST:PORT")
        return sorted(value)
