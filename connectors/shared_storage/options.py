"""The connector's own settings: parsed from what the user wrote, validated, with their defaults."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.connectors.base import ConnectorContext
from pdserve.connectors.blocks.block_format import BlockFormat
from pdserve.connectors.blocks.options import (
    TRANSFER_PARSERS,
    Parser,
    TransferOptions,
    check_size,
    count_transfer_threads,
    parse_bytes,
    parse_flag,
    parse_seconds,
    parse_values,
)

CONNECTOR_NAME = "shared_storage"
_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED_MEMORY_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class StorageOptions(TransferOptions):
    """Settings of the shared-storage connector.

    Attributes:
        path: the directory; every engine that shares KV names the same one.
        max_bytes: the store is kept below this; None = a quarter of the file system, and at most what is free.
        min_age_s: evicting a file younger than this is told in the log: it may be on its way to a decode instance.
        writer_threads: threads that save; as many as load: what shows of a save is its last chunk, when cores are free.
        layerwise: write a block's first layers while its last ones are computed; else all after the forward pass.
    """

    path: Path
    max_bytes: int | None = None
    min_age_s: float = 60.0
    writer_threads: int = field(default_factory=count_transfer_threads)
    layerwise: bool = True


def parse_options(context: ConnectorContext) -> StorageOptions:
    """Validate ``context.options``.

    Raises:
        ConfigError: an option is unknown, ill-typed or too small for one block.
    """
    values = parse_values(CONNECTOR_NAME, context, _PARSERS)
    if "path" not in values:
        values["path"] = get_default_path()
    options = StorageOptions(**values)
    value_bytes = BlockFormat(context.identity, context.spec).value_bytes
    check_size(CONNECTOR_NAME, "max_bytes", options.max_bytes, value_bytes)
    check_size(CONNECTOR_NAME, "max_staging_bytes", options.max_staging_bytes, value_bytes)
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


def _parse_path(raw: Any) -> Path:
    if not isinstance(raw, (str, Path)) or not str(raw):
        raise ValueError("give a directory")
    return Path(raw).expanduser().absolute()


_PARSERS: dict[str, Parser] = {
    "path": _parse_path,
    "max_bytes": parse_bytes,
    "min_age_s": parse_seconds,
    "layerwise": parse_flag,
    **TRANSFER_PARSERS,
}
