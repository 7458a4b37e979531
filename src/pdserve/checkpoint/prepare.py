"""Directories in Hugging Face's form for any model source; a GGUF file is converted once and cached."""

from __future__ import annotations

import json
import logging
import re
import time
from pathlib import Path
from typing import Any

from pdserve.checkpoint.cached_directory import build_once, require_free_space
from pdserve.checkpoint.digests import content_digest
from pdserve.checkpoint.gguf_config import build_config, build_generation_config
from pdserve.checkpoint.gguf_file import GGUFFile, open_gguf
from pdserve.checkpoint.gguf_tokenizer import build_tokenizer
from pdserve.checkpoint.gguf_weights import DTYPES, converted_bytes, plan_tensors, write_weights
from pdserve.checkpoint.source import ModelKind, ModelSource
from pdserve.checkpoint.weight_files import weight_files
from pdserve.errors import ConfigError

_log = logging.getLogger(__name__)
_CONVERTER_VERSION = 1
"""Part of a converted directory's name; it changes when the same GGUF file gives other files."""


def prepare_tokenizer(source: ModelSource) -> Path:
    """A directory with tokenizer.json, tokenizer_config.json, config.json and generation_config.json.

    A Hugging Face directory is its own; it may lack the last one.

    Raises:
        ConfigError: the file is damaged, of an unsupported kind, or the cache cannot be written.
    """
    if source.kind is ModelKind.HF_DIRECTORY:
        return source.path
    return build_once(
        _cache_name(source, "tokenizer"),
        lambda directory: _write_tokenizer(open_gguf(source.path), "bfloat16", directory),
    )


def prepare_weights(source: ModelSource, dtype: str) -> Path:
    """A directory that the engine and transformers can load: configuration, tokenizer and safetensors.

    A Hugging Face directory is its own, whatever dtype its weights have. A GGUF file is dequantised into the
    cache; the next start finds it there.

    Args:
        source: from `resolve_model`.
        dtype: ``float32`` keeps the dequantised values, ``bfloat16`` rounds them once.

    Raises:
        ConfigError: no safetensors, a damaged or unsupported file, or a cache that is full or not writable.
    """
    if source.kind is ModelKind.HF_DIRECTORY:
        weight_files(source.path)
        return source.path
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not supported; use one of {', '.join(DTYPES)}")
    return build_once(_cache_name(source, dtype), lambda directory: _convert(source, dtype, directory))


def _cache_name(source: ModelSource, suffix: str) -> str:
    digest = content_digest([source.path])[:16]
    safe_name = re.sub(r"[^\w.-]+", "-", source.name)
    return f"{safe_name}-{digest}-{suffix}-v{_CONVERTER_VERSION}"


def _convert(source: ModelSource, dtype: str, directory: Path) -> None:
    started = time.monotonic()
    gguf = open_gguf(source.path)
    plan = plan_tensors(gguf, build_config(gguf, dtype))
    num_bytes = sum(converted_bytes(tensor, dtype) for tensor in plan)
    _log.info("converting %s to %s (%.0f MB); this happens once", source.path, dtype, num_bytes / 1e6)
    require_free_space(directory, num_bytes)
    _write_tokenizer(gguf, dtype, directory)
    write_weights(gguf, plan, dtype, directory)
    _log.info("converted %s to %s in %.1f s", source.path.name, dtype, time.monotonic() - started)


def _write_tokenizer(gguf: GGUFFile, dtype: str, directory: Path) -> None:
    tokenizer, tokenizer_config = build_tokenizer(gguf)
    _write_json(directory / "config.json", build_config(gguf, dtype))
    _write_json(directory / "generation_config.json", build_generation_config(gguf))
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
