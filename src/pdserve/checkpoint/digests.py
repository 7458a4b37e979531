"""What identifies a model: the content of its weights and the settings that decide its computation."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash

from pdserve import env
from pdserve.checkpoint.weight_files import weight_files
from pdserve.errors import ConfigError

_log = logging.getLogger(__name__)
_READ_BYTES = 8 * 1024 * 1024

_ARCHITECTURE_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "layer_types",
    "partial_rotary_factor",
)


def weights_digest(directory: Path) -> str:
    """Hex digest (xxh3, 128 bits) of the safetensors' content in sorted order; their names do not count.

    Kept in the cache directory under each file's real path, size and modification time, so that the next start
    does not read the weights.

    Raises:
        ConfigError: the directory holds no safetensors or one cannot be read.
    """
    return content_digest(weight_files(directory))


def content_digest(files: Sequence[Path]) -> str:
    """Hex digest (xxh3, 128 bits) of the files' content, one behind the other; cached as `weights_digest` says.

    Raises:
        ConfigError: a file cannot be read.
    """
    try:
        remembered = _digest_file(files)
        with suppress(OSError):
            return remembered.read_text(encoding="ascii")
        digest = _hash_content(files)
    except OSError as error:
        raise ConfigError(f"model file {error.filename} cannot be read: {error.strerror or error}") from error
    _remember(remembered, digest)
    return digest


def architecture_digest(config: Mapping[str, Any]) -> str:
    """Hex digest of the fields of a transformers configuration that decide the computation.

    Defaults are filled in and both spellings of rope settings are read, so that two files that say the same
    give the same digest; names, versions and token ids do not count.

    Args:
        config: the content of a ``config.json``.
    """
    fields = {name: config.get(name) for name in _ARCHITECTURE_FIELDS}
    for flag in ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"):
        fields[flag] = bool(fields[flag])
    num_heads = config.get("num_attention_heads") or 1
    fields["num_key_value_heads"] = config.get("num_key_value_heads") or num_heads
    fields["head_dim"] = config.get("head_dim") or (config.get("hidden_size") or 0) // num_heads
    fields["rope"] = _rope_fields(config)
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def _rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    rope["rope_theta"] = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if rope["rope_type"] != "default":
        # Scaled variants may fall back on the context length.
        rope["max_position_embeddings"] = config.get("max_position_embeddings")
    return rope


def _digest_file(files: Sequence[Path]) -> Path:
    identity = []
    for file in files:
        real = file.resolve(strict=True)
        stat = real.stat()
        identity.append([str(real), stat.st_size, stat.st_mtime_ns])
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
    return env.get_cache_dir() / "digests" / key


def _hash_content(files: Sequence[Path]) -> str:
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_READ_BYTES))
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                hasher.update(buffer[:count])
    return str(hasher.hexdigest())


def _remember(path: Path, digest: str) -> None:
    """Write ``digest`` under a temporary name and rename it; a cache that cannot be written costs time only."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".", delete=False) as file:
            temporary = file.name
            file.write(digest)
        os.replace(temporary, path)
    except OSError as error:
        _log.warning("the digest of the weights cannot be cached in %s: %s", path.parent, error)
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)
