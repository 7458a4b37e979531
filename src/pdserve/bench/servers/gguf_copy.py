"""The weights of a GGUF file once more, in the dtype that the others compute in: llama.cpp's side of a comparison."""

from __future__ import annotations

from pathlib import Path

import gguf
from gguf import quants

from pdserve.checkpoint.cached_directory import build_once
from pdserve.checkpoint.digests import content_digest
from pdserve.checkpoint.gguf_file import GGUFFile, open_gguf
from pdserve.checkpoint.source import ModelKind, ModelSource
from pdserve.errors import ConfigError

_TYPES = {"bfloat16": gguf.GGMLQuantizationType.BF16, "float32": gguf.GGMLQuantizationType.F32}
_FILE_TYPES = {"bfloat16": gguf.LlamaFileType.MOSTLY_BF16, "float32": gguf.LlamaFileType.ALL_F32}
_OWN_KEYS = ("general.architecture", "general.file_type", "general.quantization_version")
_FILE = "model.gguf"


def prepare_gguf(source: ModelSource, dtype: str) -> Path:
    """A GGUF file with the weights of ``source`` in ``dtype``, made once and cached.

    Raises:
        ConfigError: the source is no GGUF file, or the cache cannot be written.
    """
    if source.kind is not ModelKind.GGUF:
        raise ConfigError(
            f"llama.cpp needs {source.name} as a GGUF file: give --llama-gguf (its convert_hf_to_gguf.py makes one)"
        )
    name = f"{source.path.stem}-{content_digest([source.path])[:16]}-{dtype}-gguf"
    return build_once(name, lambda directory: _copy(source.path, dtype, directory / _FILE)) / _FILE


def _copy(path: Path, dtype: str, target: Path) -> None:
    original = open_gguf(path)
    writer = gguf.GGUFWriter(target, original.require("general.architecture", str))
    writer.add_file_type(_FILE_TYPES[dtype])
    for field in gguf.GGUFReader(path).fields.values():
        if field.name.startswith("GGUF.") or field.name in _OWN_KEYS:
            continue
        element = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=element)
    for name in original.tensors:
        _add_tensor(writer, original, name, dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tensor(writer: gguf.GGUFWriter, original: GGUFFile, name: str, dtype: str) -> None:
    values = original.read(name)
    # llama.cpp wants norms and biases, the tensors of one dimension, in float32 whatever the rest is in.
    kind = _TYPES[dtype] if values.ndim > 1 else gguf.GGMLQuantizationType.F32
    writer.add_tensor(name, quants.quantize(values, kind), raw_shape=None, raw_dtype=kind)
