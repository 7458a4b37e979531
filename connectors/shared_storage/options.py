"""The connector's own settings: parsed from what the user wrote, validated, with their defaults."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.connectors.base import ConnectorContext
from pdserve.connectors.shared_storage.block_file import HEADER_BYTES
from pdserve.errors import ConfigError

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED_MEMORY_BYTES = 1 << 30
_SIZE = re.compile(r"(\d+)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_SAVE_CHOICES = ("auto", "always", "never")


@dataclass(frozen=True)
class StorageOptions:
    """Settings of the shared-storage connector.

    Attributes:
        path: the directory; every engine that shares KV names the same one.
        save: ``auto`` = the prefill role saves; ``always``; ``never``.
        max_bytes: the store is kept below this; None = a quarter of the file system, and at most what is free.
        min_age_s: files younger than this are evicted last: they may be on their way to a decode instance.
        max_staging_bytes: bound of the memory that holds blocks on their way to the disk.
        save_timeout_s: longest wait of a step for room in that memory; what finds none is not saved.
        reader_threads: threads that load.
        writer_threads: threads that save.
    """

    path: Path
    save: str = "auto"
    max_bytes: int | None = None
    min_age_s: float = 60.0
    max_staging_bytes: int = 256 << 20
    save_timeout_s: float = 2.0
    reader_threads: int = 2
    writer_threads: int = 1


def parse_options(context: ConnectorContext) -> StorageOptions:
    """Validate ``context.options``.

    Raises:
        ConfigError: an option is unknown, ill-typed or too small for one block.
    """
    values: dict[str, Any] = {}
    for name, raw in context.options.items():
        if name not in _PARSERS:
            raise ConfigError(f"connector shared_storage: option {name!r} is unknown; known: {', '.join(_PARSERS)}")
        try:
            values[name] = _PARSERS[name](raw)
        except ValueError as error:
            raise ConfigError(f"connector shared_storage: option {name}={raw!r}: {error}") from None
    if "path" not in values:
        values["path"] = get_default_path()
    options = StorageOptions(**values)
    _check_sizes(options, HEADER_BYTES + context.spec.block_bytes)
    return options


def get_default_path() -> Path:
    """A directory of this user's own: in shared memory where there is a useful amount of it, else on disk.

    The choice depends on the machine alone, so that all of a machine's engines agree on it. Containers often get
    64 MiB of shared memory, which holds a few prompts only; the temporary directory serves better there.
    """
    name = f"pdserve-{os.getuid()}"
    try:
        stats = os.statvfs(_SHARED_MEMORY)
        if stats.f_blocks * stats.f_frsize >= _LEAST_SHARED_MEMORY_BYTES:
            return _SHARED_MEMORY / name
    except OSError:
        pass
    return Path(tempfile.gettempdir()) / name


def _check_sizes(options: StorageOptions, file_bytes: int) -> None:
    for name in ("max_bytes", "max_staging_bytes"):
        value = getattr(options, name)
        if value is not None and value < file_bytes:
            raise ConfigError(
                f"connector shared_storage: option {name}={value} is below the {file_bytes} bytes of one block"
            )


def _parse_path(raw: Any) -> Path:
    if not isinstance(raw, (str, Path)) or not str(raw):
        raise ValueError("give a directory")
    return Path(raw).expanduser().absolute()


def _parse_save(raw: Any) -> str:
    if raw not in _SAVE_CHOICES:
        raise ValueError(f"give one of {', '.join(_SAVE_CHOICES)}")
    return str(raw)


def _parse_bytes(raw: Any) -> int:
    if isinstance(raw, int) and not isinstance(raw, bool) and raw >= 0:
        return raw
    match = _SIZE.fullmatch(raw.strip()) if isinstance(raw, str) else None
    if match is None:
        raise ValueError("give bytes, as a number or like 512MiB")
    number, prefix, is_binary = match.groups()
    base = 1024 if is_binary else 1000
    exponent = " KMGT".index(prefix.upper() or " ")
    return int(number) * int(base**exponent)


def _parse_seconds(raw: Any) -> float:
    if isinstance(raw, (int, float, str)) and not isinstance(raw, bool):
        value = float(raw)
        if 0 <= value < float("inf"):
            return value
    raise ValueError("give seconds, 0 or more")


def _parse_threads(raw: Any) -> int:
    if isinstance(raw, (int, str)) and not isinstance(raw, bool):
        value = int(raw)
        if 1 <= value <= 64:
            return value
    raise ValueError("give a number of threads from 1 to 64")


_PARSERS: dict[str, Callable[[Any], Any]] = {
    "path": _parse_path,
    "save": _parse_save,
    "max_bytes": _parse_bytes,
    "min_age_s": _parse_seconds,
    "max_staging_bytes": _parse_bytes,
    "save_timeout_s": _parse_seconds,
    "reader_threads": _parse_threads,
    "writer_threads": _parse_threads,
}
