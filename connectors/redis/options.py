"""The connector's own settings. Secrets come from the environment or a file, and are shown nowhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from pdserve import env
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

CONNECTOR_NAME = "redis"
_DEFAULT_PORT = 6379
_URL_FORMS = "redis://host:port/db, rediss://host:port/db (TLS) or unix:///path"


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server listens.

    Attributes:
        host: name or address; empty for a unix socket.
        port: of TCP.
        unix_path: of the socket; empty for TCP.
        is_tls: TCP inside TLS.
        db: number of the database.
    """

    host: str = "127.0.0.1"
    port: int = _DEFAULT_PORT
    unix_path: str = ""
    is_tls: bool = False
    db: int = 0

    def __str__(self) -> str:
        if self.unix_path:
            return f"unix://{self.unix_path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.is_tls else 'redis'}://{host}:{self.port}/{self.db}"


@dataclass(frozen=True, kw_only=True)
class RedisOptions(TransferOptions):
    """Settings of the Redis connector.

    Attributes:
        url: where the server is; of a cluster, any node.
        cluster: the server is a node of a cluster.
        username: ACL user; None = the default user.
        password: from the environment or ``password_file``.
        tls_ca_file: certificates that sign the server's; None = the system's.
        tls_cert_file: this client's certificate, where the server asks for one.
        tls_key_file: its key.
        prefix: in front of every key.
        ttl_s: a block that nobody used for so long goes; 0 = blocks stay until the server evicts them.
        timeout_s: longest wait for an answer, counted from the last question.
        lookup_timeout_s: longest wait of a request for its lookup; then its prompt is computed.
        max_batch_bytes: bound of what one exchange with the server carries when saving.
        reader_threads: as for all stores; a second reader drives the server onto the core of decode's forward pass.
        writer_threads: as for all stores; with two, one prepares a batch while the server takes the other's.
    """

    url: Address = Address()
    cluster: bool = False
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls_ca_file: Path | None = None
    tls_cert_file: Path | None = None
    tls_key_file: Path | None = None
    prefix: str = "pdserve"
    ttl_s: int = 3600
    timeout_s: float = 2.0
    lookup_timeout_s: float = 0.5
    max_batch_bytes: int = 4 << 20
    save_timeout_s: float = 0.5
    load_timeout_s: float = 10.0
    reader_threads: int = 1
    writer_threads: int = 2


def parse_options(context: ConnectorContext) -> RedisOptions:
    """Validate ``context.options`` and read the secrets.

    Raises:
        ConfigError: an option is unknown, ill-typed or contradicts another, or a file cannot be read.
    """
    values = parse_values(CONNECTOR_NAME, context, _PARSERS)
    values["password"] = values.pop("password_file", None) or env.get_redis_password()
    options = RedisOptions(**values)
    value_bytes = BlockFormat(context.identity, context.spec).value_bytes
    check_size(CONNECTOR_NAME, "max_staging_bytes", options.max_staging_bytes, value_bytes)
    _check_combination(options)
    return options


def _check_combination(options: RedisOptions) -> None:
    if options.cluster and (options.url.unix_path or options.url.db):
        raise _error("a cluster is reached by TCP and has database 0 only")
    tls_files = [name for name in ("tls_ca_file", "tls_cert_file", "tls_key_file") if getattr(options, name)]
    if tls_files and not options.url.is_tls:
        raise _error(f"option {tls_files[0]} needs a url of the form rediss://host:port")
    if (options.tls_cert_file is None) != (options.tls_key_file is None):
        raise _error("options tls_cert_file and tls_key_file belong together")
    if options.username is not None and options.password is None:
        raise _error("option username needs a password: set PDSERVE_REDIS_PASSWORD or option password_file")
    for name in ("timeout_s", "lookup_timeout_s"):
        if getattr(options, name) == 0:
            raise _error(f"option {name} must be above 0")


def _error(message: str) -> ConfigError:
    return ConfigError(f"connector {CONNECTOR_NAME}: {message}")


def get_server_url(options: Mapping[str, Any]) -> str:
    """Where the server is with these options, written out in full."""
    return str(_parse_url(options["url"]) if "url" in options else Address())


def _parse_url(raw: Any) -> Address:
    text = parse_text(raw)
    # A password may hold characters that end a host's name, or stand where a port does; and the message of a ValueError
    # shows what was written.
    if "?" in text or ("@" in text and not text.startswith("unix:///")):
        raise ConfigError(
            "connector redis: option url holds a user, a password or settings: use the other options, and for a "
            "password PDSERVE_REDIS_PASSWORD or option password_file"
        )
    parts = urlsplit(text)
    if parts.fragment:
        raise ValueError(f"give {_URL_FORMS}")
    if parts.scheme == "unix" and parts.path and not parts.netloc:
        return Address(host="", unix_path=parts.path)
    if parts.scheme in ("redis", "rediss") and parts.hostname:
        return _parse_tcp(parts)
    raise ValueError(f"give {_URL_FORMS}")


def _parse_tcp(parts: SplitResult) -> Address:
    db = parts.path.strip("/") or "0"
    if not db.isdecimal():
        raise ValueError("the database behind the host is a number")
    return Address(
        host=parts.hostname or "",
        port=parts.port or _DEFAULT_PORT,
        is_tls=parts.scheme == "rediss",
        db=int(db),
    )


def _parse_file(raw: Any) -> Path:
    path = Path(parse_text(raw)).expanduser()
    if not path.is_file():
        raise ValueError("there is no such file")
    return path


def _parse_password_file(raw: Any) -> str:
    try:
        password = _parse_file(raw).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"it cannot be read: {type(error).__name__}") from None
    if not password:
        raise ValueError("the file is empty")
    return password


def _parse_whole_seconds(raw: Any) -> int:
    value = parse_seconds(raw)
    if value != int(value):
        raise ValueError("give whole seconds")
    return int(value)


_PARSERS: dict[str, Parser] = {
    "url": _parse_url,
    "cluster": parse_flag,
    "username": parse_text,
    "password_file": _parse_password_file,
    "tls_ca_file": _parse_file,
    "tls_cert_file": _parse_file,
    "tls_key_file": _parse_file,
    "prefix": parse_text,
    "ttl_s": _parse_whole_seconds,
    "timeout_s": parse_seconds,
    "lookup_timeout_s": parse_seconds,
    "max_batch_bytes": parse_bytes,
    **TRANSFER_PARSERS,
}
