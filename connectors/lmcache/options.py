"""The connector's own settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pdserve.connectors.base import ConnectorContext
from pdserve.connectors.blocks.block_format import BlockFormat
from pdserve.connectors.blocks.options import (
    TRANSFER_PARSERS,
    Parser,
    TransferOptions,
    check_size,
    parse_bytes,
    parse_flag,
    parse_seconds,
    parse_text,
    parse_values,
)
from pdserve.errors import ConfigError

CONNECTOR_NAME = "lmcache"
_LEAST_POOL_BLOCKS = 16
_SPARE_CALLS = 2
_URL_FORMS = "fs:///directory, redis://host:port/db or unix:///socket (Redis)"
_REFUSED = {
    "resp": "its lookups may wait for ever",
    "lm": "its server confirms no write",
}


@dataclass(frozen=True, slots=True)
class Remote:
    """What all engines share.

    Attributes:
        scheme: ``fs`` or ``redis``.
        location: the directory, or the server's URL (``unix://`` too).
    """

    scheme: str
    location: str

    def __str__(self) -> str:
        return f"fs://{self.location}" if self.scheme == "fs" else self.location


@dataclass(frozen=True, kw_only=True)
class LMCacheOptions(TransferOptions):
    """Settings of the LMCache connector.

    Attributes:
        url: what all engines share: a directory or a Redis server.
        cpu_cache: keep what was saved or loaded in LMCache's memory, for this engine's own next load.
        max_cpu_bytes: LMCache's memory, in which transfers happen too; taken at start.
        local_disk_path: a directory of this engine alone, as a further tier; None = no such tier.
        max_local_disk_bytes: the local disk tier is kept below this.
        timeout_s: longest wait for LMCache to read or write one batch.
        lookup_timeout_s: longest wait of a request for its lookup; then its prompt is computed.
    """

    url: Remote
    cpu_cache: bool = True
    max_cpu_bytes: int = 256 << 20
    local_disk_path: Path | None = None
    max_local_disk_bytes: int = 4 << 30
    timeout_s: float = 5.0
    lookup_timeout_s: float = 0.5

    @property
    def num_calls(self) -> int:
        """Calls of LMCache that may be under way at once; a few may hang and leave the others room."""
        return self.reader_threads + self.writer_threads + _SPARE_CALLS


def parse_options(context: ConnectorContext) -> LMCacheOptions:
    """Validate ``context.options``.

    Raises:
        ConfigError: an option is missing, unknown, ill-typed or too small.
    """
    values = parse_values(CONNECTOR_NAME, context, _PARSERS)
    if "url" not in values:
        raise ConfigError(
            f"connector {CONNECTOR_NAME}: option url is missing: what all engines share, like {_URL_FORMS}"
        )
    options = LMCacheOptions(**values)
    value_bytes = BlockFormat(context.identity, context.spec).value_bytes
    check_size(CONNECTOR_NAME, "max_staging_bytes", options.max_staging_bytes, value_bytes)
    check_size(CONNECTOR_NAME, "max_local_disk_bytes", options.max_local_disk_bytes, value_bytes)
    num_blocks = max(_LEAST_POOL_BLOCKS, 3 * options.num_calls)
    if options.max_cpu_bytes < num_blocks * value_bytes:
        raise ConfigError(
            f"connector {CONNECTOR_NAME}: option max_cpu_bytes={options.max_cpu_bytes} is below what transfers need: "
            f"{num_blocks} blocks of {value_bytes} bytes"
        )
    for name in ("timeout_s", "lookup_timeout_s"):
        if getattr(options, name) == 0:
            raise ConfigError(f"connector {CONNECTOR_NAME}: option {name} must be above 0")
    return options


def _parse_url(raw: Any) -> Remote:
    parts = urlsplit(parse_text(raw))
    if "@" in parts.netloc:
        # The ValueError's message shows what was written: a password must not be in it.
        raise ConfigError(
            f"connector {CONNECTOR_NAME}: option url holds a user or password, which LMCache would write to its log; "
            "connector redis takes one from PDSERVE_REDIS_PASSWORD"
        )
    if parts.scheme in _REFUSED:
        raise ValueError(f"LMCache's {parts.scheme}:// is not used here: {_REFUSED[parts.scheme]}; give {_URL_FORMS}")
    if parts.scheme == "fs" and not parts.netloc and len(parts.path) > 1:
        if "," in parts.path:
            raise ValueError("LMCache takes a comma for several directories; give one")
        return Remote("fs", parts.path)
    is_redis = parts.scheme == "redis" and parts.hostname
    is_socket = parts.scheme == "unix" and parts.path and not parts.netloc
    if (is_redis or is_socket) and not parts.query:
        return Remote("redis", raw)
    raise ValueError(f"give {_URL_FORMS}")


def _parse_path(raw: Any) -> Path:
    return Path(parse_text(raw)).expanduser().absolute()


_PARSERS: dict[str, Parser] = {
    "url": _parse_url,
    "cpu_cache": parse_flag,
    "max_cpu_bytes": parse_bytes,
    "local_disk_path": _parse_path,
    "max_local_disk_bytes": parse_bytes,
    "timeout_s": parse_seconds,
    "lookup_timeout_s": parse_seconds,
    **TRANSFER_PARSERS,
}
