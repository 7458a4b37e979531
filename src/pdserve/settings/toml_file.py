"""The file of ``--config``: sections as tables, for one command or for a whole service.

The commands of a service may share one file. Sections of the others are left to them, and a table that is called as a
process, like ``[run-prefill.instance]``, holds sections of that process alone, which go over the common ones. What
belongs to no command is refused.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pdserve.errors import ConfigError
from pdserve.settings.fields import Option, ValueKind

PROCESS_OF_COMMAND = {
    "run-prefill": "run-prefill",
    "run-decode": "run-decode",
    "run-router": "run-router",
    "pdserve doctor": "run-router",
    "pdserve up": None,
}
"""Whose own table each command reads that may share its file: the doctor asks a router's instances, ``up`` has none."""

SERVICE_SECTIONS = frozenset(
    (
        *("model", "cache", "scheduler", "connector", "instance"),
        *("http", "answers", "pools", "handoff", "admission", "access", "tracing"),
        *("up", "doctor"),
    )
)
"""Sections of all commands that may share a file; names only, because the leaf does not know the commands."""

INSTANCE_MODEL_KEYS = frozenset(
    (
        *("dtype", "max_model_len", "quantization", "device", "kernel_backend", "num_threads"),
        *("tensor_parallel_size", "pipeline_parallel_size", "worker_timeout_s"),
    )
)
"""What instances know of ``[model]`` and routers, which have that section too, do not."""

_PROCESSES = frozenset(process for process in PROCESS_OF_COMMAND.values() if process is not None)


def read_toml(
    path: Path, options: Iterable[Option], sections: Iterable[str], command: str
) -> dict[tuple[str, str], Any]:
    """The checked values in a file, by ``(section, name)``.

    Args:
        path: the file.
        options: the command's.
        sections: names of the command's sections.
        command: as people type it.

    Raises:
        ConfigError: the file cannot be read, or has what no command that may share it knows, or a wrong value.
    """
    tables = _parse(path)
    is_shared = command in PROCESS_OF_COMMAND
    process = PROCESS_OF_COMMAND.get(command)
    own = tables.pop(process, {}) if process is not None else {}
    reader = _Reader(path, options, sections)
    values = reader.read(tables, others=SERVICE_SECTIONS | _PROCESSES if is_shared else frozenset())
    if not isinstance(own, dict):
        raise ConfigError(f"{path}: {process} = {own!r} is not a table; write [{process}.SECTION] and keys below it")
    for key, value in reader.read(own, prefix=f"{process}.").items():
        is_table = reader.options[key].kind is ValueKind.TABLE
        values[key] = {**values.get(key, {}), **value} if is_table else value
    return values


def describe_unknown(what: str, name: str, known: Sequence[str]) -> str:
    """What to tell of a name that nobody knows."""
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    return f"unknown {what} {name}" + (f"; the nearest known one is {nearest[0]}" if nearest else "")


class _Reader:
    """Reads one command's sections.

    Args:
        path: the file, for messages.
        options: the command's.
        sections: names of the command's sections.
    """

    def __init__(self, path: Path, options: Iterable[Option], sections: Iterable[str]) -> None:
        self._path = path
        self._sections = list(sections)
        self.options = {option.key: option for option in options}

    def read(
        self, tables: Mapping[str, Any], *, prefix: str = "", others: frozenset[str] = frozenset()
    ) -> dict[tuple[str, str], Any]:
        """The values in ``tables``, called ``[prefix + section]``; tables called as in ``others`` are left out.

        Raises:
            ConfigError: a section or key is unknown, or a value is wrong.
        """
        values = {}
        for section, table in tables.items():
            place = f"[{prefix}{section}]"
            if section in self._sections:
                values.update(self._read_section(section, table, place, is_shared=bool(others)))
            elif section not in others:
                known = [f"[{prefix}{name}]" for name in (*self._sections, *sorted(others))]
                raise ConfigError(f"{self._path}: {describe_unknown('section', place, known)}")
        return values

    def _read_section(self, section: str, table: Any, place: str, *, is_shared: bool) -> dict[tuple[str, str], Any]:
        if not isinstance(table, dict):
            name = place.strip("[]")
            raise ConfigError(f"{self._path}: {name} = {table!r} is not a table; write {place} and keys below it")
        known = [name for known_section, name in self.options if known_section == section]
        values = {}
        for name, value in table.items():
            if name in known:
                values[section, name] = self._check(self.options[section, name], value, place)
            elif not (is_shared and section == "model" and name in INSTANCE_MODEL_KEYS):
                raise ConfigError(f"{self._path}: {place} {describe_unknown('key', name, known)}")
        return values

    def _check(self, option: Option, value: Any, place: str) -> Any:
        try:
            return option.check(value)
        except ConfigError as error:
            raise ConfigError(f"{self._path}: {place} {option.name}: {error.message}") from None


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not TOML: {error}") from None
