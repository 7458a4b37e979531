"""The environment variables pdserve reads, and nowhere else. Settings belong in flags or the TOML file.

Environment variables hold secrets, the cache's place and debugging switches only.
"""

from __future__ import annotations

import os
from pathlib import Path


def get_cache_dir() -> Path:
    """Directory for converted models: ``PDSERVE_CACHE_DIR``, else ``$XDG_CACHE_HOME/pdserve``."""
    explicit = os.environ.get("PDSERVE_CACHE_DIR")
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pdserve"


def get_log_level() -> str:
    """Log level of every process: ``PDSERVE_LOG_LEVEL``, default ``INFO``."""
    return os.environ.get("PDSERVE_LOG_LEVEL", "INFO").upper()


def get_hub_token() -> str | None:
    """Token for gated models on the hub: ``HF_TOKEN``. Never logged."""
    return os.environ.get("HF_TOKEN")


def get_redis_password() -> str | None:
    """Password of the Redis connector: ``PDSERVE_REDIS_PASSWORD``. Never logged."""
    return os.environ.get("PDSERVE_REDIS_PASSWORD") or None


def child_environment(log_level: str) -> dict[str, str]:
    """This process's environment for a child that logs at ``log_level``."""
    return {**os.environ, "PDSERVE_LOG_LEVEL": log_level}
