"""What each connector needs around it for a run: a directory in shared memory, a server, nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pdserve.connectors.testing.targets.redis_process import RedisProcess
from pdserve.errors import ConfigError

CONNECTORS = ("memory", "nixl", "shared_storage", "redis", "lmcache", "multi")
_PACKAGES = {"nixl": "nixl", "redis": "redis", "lmcache": "lmcache", "multi": "nixl"}
_SHARED_MEMORY = Path("/dev/shm")
_REDIS_OVERHEAD = 1.3
"""Its allocator rounds values up."""
_SWEEP_S = 0.1


def find_hindrance(connector: str) -> str | None:
    """Why the connector cannot be measured here; None when it can."""
    package = _PACKAGES.get(connector)
    if package is not None and importlib.util.find_spec(package) is None:
        return f"the package {package} is not installed"
    if connector == "redis" and not RedisProcess.is_installed():
        return "there is no redis-server"
    return None


@contextlib.contextmanager
def surroundings(connector: str, store_bytes: int | None) -> Iterator[dict[str, Any]]:
    """Options for both engines; what was started or made for them is gone afterwards.

    Args:
        connector: its name.
        store_bytes: of KV that files and a Redis server hold before they evict; None = no limit. LMCache deletes
            nothing: its oldest files are deleted here, as whoever runs it would do.

    Raises:
        ConfigError: something does not start.
    """
    with contextlib.ExitStack() as stack:
        match connector:
            case "memory":
                yield {"store": {}}
            case "redis":
                yield {"url": stack.enter_context(_redis_server(store_bytes))}
            case "shared_storage":
                yield {"path": stack.enter_context(_directory()), **_limit_files(store_bytes)}
            case "lmcache":
                path = stack.enter_context(_directory())
                if store_bytes is not None:
                    stack.enter_context(_swept(path, store_bytes))
                # What it keeps in its own memory is no hand-off.
                yield {"url": f"fs://{path}", "cpu_cache": False}
            case "multi":
                files = {"path": stack.enter_context(_directory()), **_limit_files(store_bytes)}
                yield {"children": [{"connector": "nixl"}, {"connector": "shared_storage", "options": files}]}
            case _:
                yield {}


@contextlib.contextmanager
def _directory() -> Iterator[str]:
    root = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="pdserve-bench-", dir=root) as path:
        yield path


@contextlib.contextmanager
def _swept(path: str, max_bytes: int) -> Iterator[None]:
    """Inside, the newest files in a directory stay, up to ``max_bytes``."""
    is_over = threading.Event()

    def sweep_again_and_again() -> None:
        while not is_over.wait(_SWEEP_S):
            _sweep(path, max_bytes)

    sweeper = threading.Thread(target=sweep_again_and_again, name="sweeper", daemon=True)
    sweeper.start()
    try:
        yield
    finally:
        is_over.set()
        sweeper.join()


def _sweep(path: str, max_bytes: int) -> None:
    files = [(entry.stat(), entry.path) for entry in os.scandir(path) if entry.is_file()]
    for status, name in sorted(files, key=lambda file: file[0].st_mtime_ns, reverse=True):
        max_bytes -= status.st_size
        if max_bytes < 0:
            os.unlink(name)


def _limit_files(store_bytes: int | None) -> dict[str, int]:
    return {} if store_bytes is None else {"max_bytes": store_bytes, "min_age_s": 0}


@contextlib.contextmanager
def _redis_server(store_bytes: int | None) -> Iterator[str]:
    settings = ["--maxmemory-policy", "volatile-ttl", "--maxmemory-samples", "64"]
    if store_bytes is not None:
        settings += ["--maxmemory", str(int(_REDIS_OVERHEAD * store_bytes))]
    process = RedisProcess(*settings)
    try:
        process.start()
        yield process.url
    except RuntimeError as error:
        raise ConfigError(f"the redis-server {error}") from error
    finally:
        process.close()
