"""The environment variables pdserve reads, and nowhere else. Settings belong in flags or the TOML file.

Environment variables hold secrets, the cache's place and debugging switches only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
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


def get_api_key() -> str | None:
    """Key that commands send to the server they speak to: ``PDSERVE_API_KEY``. Never logged."""
    return os.environ.get("PDSERVE_API_KEY") or None


def get_api_keys() -> str | None:
    """Keys that a router takes from its clients: ``PDSERVE_API_KEYS``, an empty one as such. Never logged."""
    return os.environ.get("PDSERVE_API_KEYS")


def extended_environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with ``changes``, for a server that is not pdserve's."""
    return {**os.environ, **changes}


def prepare_for_nixl(net_devices: str | None) -> None:
    """Set what UCX and NIXL read once, when they are loaded; what the user has set stays.

    Args:
        net_devices: ``UCX_NET_DEVICES``; None = UCX uses, and listens on, every device it finds.
    """
    if net_devices is not None:
        os.environ.setdefault("UCX_NET_DEVICES", net_devices)
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")


def prepare_for_lmcache() -> None:
    """Set what LMCache reads while it is imported: no usage reports, no banner, no log; what the user has set stays.

    pdserve counts LMCache's failures and warns of them itself.
    """
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
    os.environ.setdefault("LMCACHE_LOG_LEVEL", "CRITICAL")


def child_environment(log_level: str) -> dict[str, str]:
    """This process's environment for a child that logs at ``log_level``."""
    return {**os.environ, "PDSERVE_LOG_LEVEL": log_level}
