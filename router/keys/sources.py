"""Where the valid keys are listed: a file, the environment, or both."""

from __future__ import annotations

import re
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.router.keys.api_key import ApiKey, parse_entries

_BETWEEN_ENTRIES = re.compile(r"[,\n]")


def read_keys(path: Path | None, environment: str | None) -> list[ApiKey]:
    """All valid keys.

    Args:
        path: a file with an entry a line, digests only.
        environment: entries separated by commas or newlines; the keys themselves may stand in the digests' place.

    Raises:
        ConfigError: a source cannot be read, holds no key or something else; nothing of it is repeated.
    """
    keys: list[ApiKey] = []
    if path is not None:
        keys += _read_file(path)
    if environment is not None:
        try:
            keys += parse_entries(_BETWEEN_ENTRIES.split(environment), takes_plain=True)
        except ValueError as error:
            raise ConfigError(f"PDSERVE_API_KEYS: {error}") from None
    return keys


def _read_file(path: Path) -> list[ApiKey]:
    try:
        return parse_entries(path.read_text(encoding="utf-8").splitlines(), takes_plain=False)
    except OSError as error:
        raise ConfigError(f"--api-keys-file {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--api-keys-file {path}: it is no text") from None
    except ValueError as error:
        raise ConfigError(f"--api-keys-file {path}: {error}") from None
