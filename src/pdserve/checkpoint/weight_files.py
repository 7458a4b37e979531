"""Which safetensors files make up a Hugging Face directory's weights."""

from __future__ import annotations

import json
from pathlib import Path

from pdserve.errors import ConfigError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of ``directory``, sorted by name.

    With an index, the shards that it names; otherwise ``model.safetensors`` or every ``*.safetensors``.

    Raises:
        ConfigError: there are none, or the index names a shard that is missing.
    """
    index = directory / INDEX_FILE
    if index.is_file():
        return _indexed_files(index)
    single = directory / SINGLE_FILE
    files = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if files:
        return files
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt*")):
        raise ConfigError(
            f"model directory {directory} holds PyTorch weights only, and safetensors are needed: convert it with"
            " transformers (`AutoModelForCausalLM.from_pretrained(old).save_pretrained(new)`)"
        )
    raise ConfigError(f"model directory {directory} holds no .safetensors file")


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is not a safetensors index: {error!r}; download it again") from error
    files = [index.parent / str(name) for name in names]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ConfigError(
            f"model directory {index.parent} is incomplete: {', '.join(missing)} missing"
            f" ({len(missing)} of {len(files)} shards); download it again"
        )
    return files
