"""Opening an LMCache engine: from the connector's options to LMCache's, and what opening does to the process undone."""

from __future__ import annotations

import functools
import math
import multiprocessing
from typing import Any

from lmcache.v1.cache_engine import LMCacheEngine
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.remote_backend import RemoteBackend

from pdserve.connectors.base import ConnectorContext
from pdserve.connectors.blocks.block_format import BlockFormat
from pdserve.connectors.lmcache.cache_engine import CacheEngine
from pdserve.connectors.lmcache.deadline_calls import CallFailedError, DeadlineCalls
from pdserve.connectors.lmcache.directories import EngineDirectories
from pdserve.connectors.lmcache.lmcache_parts import DTYPE, BlockCopier, DigestDatabase
from pdserve.connectors.lmcache.options import CONNECTOR_NAME, LMCacheOptions
from pdserve.connectors.lmcache.shared_files import NUM_THREADS_SETTING, PLUGIN_NAME, SharedFiles
from pdserve.errors import ConfigError

_GIB = 1 << 30
_ALIGNMENT = 4096
_START_TIMEOUT_S = 60.0
_LOOKUP_POOL_BLOCKS = 2


def open_for_lookups(
    context: ConnectorContext, options: LMCacheOptions, directories: EngineDirectories, calls: DeadlineCalls
) -> CacheEngine:
    """An engine that is only asked: no tiers in front, next to no memory.

    Raises:
        ConfigError: LMCache cannot be started.
    """
    value_bytes = BlockFormat(context.identity, context.spec).value_bytes
    settings = {"local_cpu": False, "max_local_cpu_size": _LOOKUP_POOL_BLOCKS * _align(value_bytes) / _GIB}
    return _open(context, options, directories, settings, calls)


def open_for_transfers(
    context: ConnectorContext, options: LMCacheOptions, directories: EngineDirectories, calls: DeadlineCalls
) -> CacheEngine:
    """An engine with all its tiers.

    Raises:
        ConfigError: LMCache cannot be started.
    """
    settings: dict[str, Any] = {"local_cpu": options.cpu_cache, "max_local_cpu_size": options.max_cpu_bytes / _GIB}
    if directories.disk is not None:
        settings["local_disk"] = f"file://{directories.disk}/"
        settings["max_local_disk_size"] = options.max_local_disk_bytes / _GIB
    return _open(context, options, directories, settings, calls)


def count_pool_blocks(options: LMCacheOptions, value_bytes: int) -> int:
    """How many values LMCache's memory holds."""
    return options.max_cpu_bytes // _align(value_bytes)


def _open(
    context: ConnectorContext,
    options: LMCacheOptions,
    directories: EngineDirectories,
    settings: dict[str, Any],
    calls: DeadlineCalls,
) -> CacheEngine:
    value_bytes = BlockFormat(context.identity, context.spec).value_bytes
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=1,
        blocking_timeout_secs=math.ceil(options.timeout_s),
        remote_storage_plugins=[PLUGIN_NAME if options.url.scheme == "fs" else options.url.scheme],
        remote_serde="naive",
        extra_config=_build_extra_config(options, directories),
        **settings,
    )
    database = DigestDatabase(f"pdserve-{context.identity.fingerprint}", context.rank)
    metadata = LMCacheMetadata(
        model_name="pdserve",
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=DTYPE,
        kv_shape=(1, 2, 1, 1, value_bytes // 2),
        chunk_size=1,
        role="worker",
    )
    # In a thread of a daemon kind: LMCache's own threads become what their maker is, and one that hangs must not keep
    # the process from ending.
    start = functools.partial(_start, config, metadata, database, BlockCopier(value_bytes))
    try:
        engine = calls.run(start, _START_TIMEOUT_S)
    except CallFailedError as error:
        raise ConfigError(f"connector {CONNECTOR_NAME}: LMCache cannot be started: {error}") from error
    _check_remote(engine, options)
    return CacheEngine(engine, database, max_writes=max(count_pool_blocks(options, value_bytes) // 2, 1))


def _start(
    config: LMCacheEngineConfig, metadata: LMCacheMetadata, database: DigestDatabase, copier: BlockCopier
) -> LMCacheEngine:
    method = multiprocessing.get_start_method(allow_none=True)
    engine = LMCacheEngine(config, metadata, database, copier, _refuse_broadcast, _refuse_broadcast)
    multiprocessing.set_start_method(method, force=True)
    engine.post_init()
    return engine


def _build_extra_config(options: LMCacheOptions, directories: EngineDirectories) -> dict[str, Any]:
    extra: dict[str, Any] = {
        # Otherwise LMCache asks whether a file is there by way of its event loop.
        "use_exists_sync": True,
        # A value's shape is known here. Read from a damaged file, it may be one that LMCache waits for memory for ever.
        "save_chunk_meta": False,
    }
    if options.url.scheme == "redis":
        return {**extra, "remote_storage_plugin.redis.redis_url": options.url.location}
    extra[f"remote_storage_plugin.{PLUGIN_NAME}.module_path"] = SharedFiles.__module__
    extra[f"remote_storage_plugin.{PLUGIN_NAME}.class_name"] = SharedFiles.__name__
    extra[NUM_THREADS_SETTING] = options.reader_threads + options.writer_threads
    extra["remote_storage_plugin.fs.base_path"] = options.url.location
    if directories.temp is not None:
        # Otherwise two writers of one block write to one temporary file.
        extra["fs_connector_relative_tmp_dir"] = directories.temp.name
    return extra


def _check_remote(engine: LMCacheEngine, options: LMCacheOptions) -> None:
    """LMCache goes on without a back-end that it cannot open."""
    backends = engine.storage_manager.storage_backends.values()
    if not any(isinstance(backend, RemoteBackend) and backend.connection is not None for backend in backends):
        raise ConfigError(f"connector {CONNECTOR_NAME}: LMCache cannot open {options.url}")


def _refuse_broadcast(*args: object) -> None:
    raise NotImplementedError("ranks share nothing through LMCache here")


def _align(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
