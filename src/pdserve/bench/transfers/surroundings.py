"""What each connector needs around it for a run: a directory in shared memory, a server, nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pdserve.connectors.testing.targets.redis_process import RedisProcess
from pdserve.errors import ConfigError

CONNECTORS = ("memory", "nixl", "shared_storage", "redis", "lmcache", "multi")
_PACKAGES = {"nixl": "nixl", "redis": "redis", "lmcache": "lmcache", "multi": "nixl"}
_SHARED_MEMORY = Path("/dev/shm")


def find_hindrance(connector: str) -> str | None:
    """Why the connector cannot be measured here; None when it can."""
    package = _PACKAGES.get(connector)
    if package is not None and importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed"
    if connector == "redis" and not RedisProcess.is_installed():
        return "there is no redis-server"
    return None


@contextlib.contextmanager
def surroundings(connector: str, redis_bytes: int) -> Iterator[dict[str, Any]]:
    """Options for both engines; what was started or made for them is gone afterwards.

    Args:
        connector: its name.
        redis_bytes: memory of a Redis server, which evicts what is oldest beyond it.

    Raises:
        ConfigError: something does not start.
    """
    with contextlib.ExitStack() as stack:
        match connector:
            case "memory":
                yield {"store": {}}
            case "redis":
                yield {"url": stack.enter_context(_redis_server(redis_bytes))}
            case "shared_storage":
                yield {"path": stack.enter_context(_directory())}
            case "lmcache":
                # What it keeps in its own memory is no hand-off.
                yield {"url": f"fs://{stack.enter_context(_directory())}", "cpu_cache": False}
            case "multi":
                store = {"connector": "shared_storage", "options": {"path": stack.enter_context(_directory())}}
                yield {"children": [{"connector": "nixl"}, store]}
            case _:
                yield {}


@contextlib.contextmanager
def _directory() -> Iterator[str]:
    root = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-", dir=root) as path:
        yield path


@contextlib.contextmanager
def _redis_server(max_bytes: int) -> Iterator[str]:
    """As one that has run for long: full, so that new values take the place of old ones."""
    eviction = ("--maxmemory-policy", "volatile-ttl", "--maxmemory-samples", "64")
    process = RedisProcess("--maxmemory", str(max_bytes), *eviction)
    try:
        process.start()
        yield process.url
    except RuntimeError as error:
        raise ConfigError(f"the redis-server {error}") from error
    finally:
        process.close()
