"""A GGUF file's tensors under transformers' names, converted row by row into safetensors shards."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pdserve.checkpoint.gguf_config import permutes_rotary_rows
from pdserve.checkpoint.gguf_file import GGUFFile, GGUFTensor
from pdserve.checkpoint.rope_freqs import ROPE_FREQS_TENSOR
from pdserve.checkpoint.weight_files import INDEX_FILE, SINGLE_FILE
from pdserve.errors import ConfigError

MAX_SHARD_BYTES = 2_000_000_000
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_QKV_BIASES = {f"attn_{x}.bias": f"self_attn.{x}_proj.bias" for x in "qkv"}
_OUTPUT_BIAS = {"attn_output.bias": "self_attn.o_proj.bias"}
_MLP_BIASES = {f"ffn_{x}.bias": f"mlp.{x}_proj.bias" for x in ("gate", "up", "down")}
_QK_NORMS = {f"attn_{x}_norm.weight": f"self_attn.{x}_norm.weight" for x in "qk"}


@dataclass(frozen=True, slots=True)
class _Dtype:
    """How safetensors spells a dtype, and the bytes of an element."""

    code: str
    num_bytes: int


DTYPES = {"bfloat16": _Dtype("BF16", 2), "float32": _Dtype("F32", 4)}


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One tensor to write.

    Attributes:
        name: transformers' name.
        source: where its data lies.
        num_rotary_heads: heads whose interleaved rows have to be put in order; 0 = the rows stay.
    """

    name: str
    source: GGUFTensor
    num_rotary_heads: int = 0


def plan_tensors(gguf: GGUFFile, config: dict[str, Any]) -> list[PlannedTensor]:
    """What to write for the model that ``config`` describes.

    Raises:
        ConfigError: a tensor is missing, has the wrong shape, or is one that the model would ignore.
    """
    if config["num_hidden_layers"] > len(gguf.tensors):
        raise ConfigError(
            f"{gguf.path}: {config['num_hidden_layers']} layers and {len(gguf.tensors)} tensors; the file is damaged"
        )
    wanted = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if not config["tie_word_embeddings"]:
        wanted["output.weight"] = "lm_head.weight"
    layer_names = _layer_names(config)
    for layer in range(config["num_hidden_layers"]):
        wanted |= {f"blk.{layer}.{old}": f"model.layers.{layer}.{new}" for old, new in layer_names.items()}
    missing = [name for name in wanted if name not in gguf.tensors]
    unknown = [name for name in gguf.tensors if name not in wanted and name != ROPE_FREQS_TENSOR]
    for kind, names in (("lacks tensors", missing), ("has tensors that this model does not use:", unknown)):
        if names:
            shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
            raise ConfigError(f"{gguf.path} {kind} {shown}; it is damaged or of an unsupported variant")
    permutes = permutes_rotary_rows(gguf)
    plan = []
    for old, new in wanted.items():
        _check_shape(gguf, old, config)
        heads = _num_rotary_heads(old, config) if permutes else 0
        plan.append(PlannedTensor(new, gguf.tensors[old], heads))
    return plan


def write_weights(gguf: GGUFFile, plan: list[PlannedTensor], dtype: str, directory: Path) -> None:
    """Write ``plan`` as ``model.safetensors``, or as shards of at most 2 GB with their index.

    Args:
        gguf: the model.
        plan: from `plan_tensors`.
        dtype: ``float32`` keeps the dequantised values, ``bfloat16`` rounds them once.
        directory: exists and is empty.

    Raises:
        ConfigError: the GGUF file cannot be read or dequantised.
        OSError: the disk is full or not writable.
    """
    shards = _split_shards(plan, dtype)
    if len(shards) == 1:
        _write_shard(gguf, shards[0], dtype, directory / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards, 1):
        name = f"model-{index:05}-of-{len(shards):05}.safetensors"
        _write_shard(gguf, shard, dtype, directory / name)
        weight_map |= {tensor.name: name for tensor in shard}
    total = sum(converted_bytes(tensor, dtype) for tensor in plan)
    index_content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index_content, indent=1), encoding="utf-8")


def converted_bytes(tensor: PlannedTensor, dtype: str) -> int:
    """Bytes that ``tensor`` takes once converted."""
    return math.prod(tensor.source.shape) * DTYPES[dtype].num_bytes


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even; a NaN stays one."""
    bits = values.view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        rounded[nan] = (bits[nan] >> 16).astype(np.uint16) | np.uint16(0x40)
    return rounded


def _layer_names(config: dict[str, Any]) -> dict[str, str]:
    names = dict(_LAYER_NAMES)
    if config["model_type"] == "qwen2":
        names |= _QKV_BIASES
    elif config["attention_bias"]:
        names |= _QKV_BIASES | _OUTPUT_BIAS
    if config.get("mlp_bias"):
        names |= _MLP_BIASES
    if config["model_type"] == "qwen3":
        names |= _QK_NORMS
    return names


def _num_rotary_heads(name: str, config: dict[str, Any]) -> int:
    part = name.split(".")[-2]
    heads: dict[str, int] = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    return heads.get(part, 0)


def _check_shape(gguf: GGUFFile, name: str, config: dict[str, Any]) -> None:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    part, kind = name.split(".")[-2:]
    matrices = {
        "token_embd": (vocab, hidden),
        "output": (vocab, hidden),
        "attn_q": (q_rows, hidden),
        "attn_k": (kv_rows, hidden),
        "attn_v": (kv_rows, hidden),
        "attn_output": (hidden, q_rows),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    if part in matrices:
        expected = matrices[part] if kind == "weight" else matrices[part][:1]
    else:
        expected = (config["head_dim"],) if part in ("attn_q_norm", "attn_k_norm") else (hidden,)
    shape = gguf.tensors[name].shape
    if shape != expected:
        raise ConfigError(f"{gguf.path}: tensor {name} has shape {list(shape)}, its metadata says {list(expected)}")


def _split_shards(plan: list[PlannedTensor], dtype: str) -> list[list[PlannedTensor]]:
    shards: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in plan:
        num_bytes = converted_bytes(tensor, dtype)
        if shards[-1] and size + num_bytes > MAX_SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += num_bytes
    return shards


def _write_shard(gguf: GGUFFile, tensors: list[PlannedTensor], dtype: str, path: Path) -> None:
    """One safetensors file, written as it is converted: memory holds some rows of one tensor.

    The format (a length, a JSON header, the data): https://github.com/huggingface/safetensors#format
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + converted_bytes(tensor, dtype)
        header[tensor.name] = {
            "dtype": DTYPES[dtype].code,
            "shape": tensor.source.shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for rows in _converted_rows(gguf, tensor, dtype):
                file.write(rows.data)


def _converted_rows(
    gguf: GGUFFile, tensor: PlannedTensor, dtype: str
) -> Iterator[npt.NDArray[np.float32] | npt.NDArray[np.uint16]]:
    order = _rotary_row_order(tensor) if tensor.num_rotary_heads else None
    if tensor.num_rotary_heads and len(tensor.source.shape) == 1:
        # A bias is one row to the reader; it is small enough to take whole.
        values: list[npt.NDArray[np.float32]] = [gguf.read(tensor.source.name)[order]]
        rows: Iterator[npt.NDArray[np.float32]] = iter(values)
    else:
        rows = gguf.read_rows(tensor.source, order)
    for group in rows:
        yield to_bfloat16(group) if dtype == "bfloat16" else np.ascontiguousarray(group)


def _rotary_row_order(tensor: PlannedTensor) -> npt.NDArray[np.intp]:
    """For each row in transformers' order (two halves a head), the row in GGML's (pairs side by side)."""
    num_rows = tensor.source.shape[0]
    rows = np.arange(num_rows).reshape(tensor.num_rotary_heads, -1, 2)
    return np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(num_rows)
