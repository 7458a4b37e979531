"""Small GGUF files, written with the gguf package from weights in transformers' order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass
class Vocabulary:
    """The tokenizer's part of a GGUF file."""

    tokens: Sequence[str]
    types: Sequence[int]
    model: str = "gpt2"
    pre: str | None = "gpt-2"
    merges: Sequence[str] | None = None
    scores: Sequence[float] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def plain_vocabulary(size: int = 64) -> Vocabulary:
    """Tokens without meaning, for tests of weights: three control tokens, letters and one merge."""
    letters = [chr(0x100 + i) for i in range(size - 4)]
    tokens = ["<unk>", "<s>", "</s>", *letters, letters[0] + letters[1]]
    return Vocabulary(tokens, [2, 3, 3] + [1] * (size - 3), merges=[f"{letters[0]} {letters[1]}"])


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor that transformers calls ``name``."""
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, layer, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{LAYER[stem]}.{kind}"


def interleave_rotary(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows from two halves a head (transformers) to pairs side by side (GGML): out[h, 2i + j] = in[h, j, i]."""
    out = np.empty_like(weight)
    head_dim = weight.shape[0] // num_heads
    for row in range(weight.shape[0]):
        head, position = divmod(row, head_dim)
        half, index = divmod(position, head_dim // 2)
        out[head * head_dim + 2 * index + half] = weight[row]
    return out


def write_gguf(
    path: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    vocabulary: Vocabulary,
    *,
    arch: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    extra_tensors: Mapping[str, np.ndarray] | None = None,
    quantize: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """Write ``weights`` (transformers' names and order) as a GGUF file of architecture ``arch``."""
    arch = arch or config["model_type"]
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(len(vocabulary.tokens))
    head_dim = config["head_dim"]
    if head_dim * config["num_attention_heads"] != config["hidden_size"]:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    _add_vocabulary(writer, vocabulary)
    for key, value in (metadata or {}).items():
        _add_value(writer, key, value)
    for name, tensor in weights.items():
        is_q, is_k = ".q_proj." in name, ".k_proj." in name
        if arch in ("llama", "mistral") and (is_q or is_k):
            heads = config["num_attention_heads" if is_q else "num_key_value_heads"]
            tensor = interleave_rotary(tensor, heads)
        _add_tensor(writer, gguf_name(name), tensor, quantize)
    for name, tensor in (extra_tensors or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_config(vocab_size: int, **changes: Any) -> dict[str, Any]:
    """The least Llama that llama.cpp and transformers both load."""
    return {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        **changes,
    }


def random_weights(config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Weights for ``config`` under transformers' names."""
    random = np.random.default_rng(seed)
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_rows, kv_rows = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (q_rows, hidden),
            prefix + "self_attn.k_proj.weight": (kv_rows, hidden),
            prefix + "self_attn.v_proj.weight": (kv_rows, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, q_rows),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
        if config["model_type"] == "qwen2" or config.get("attention_bias"):
            for part, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
                shapes[prefix + f"self_attn.{part}_proj.bias"] = (rows,)
        if config.get("attention_bias"):
            shapes[prefix + "self_attn.o_proj.bias"] = (hidden,)
        if config["model_type"] == "qwen3":
            shapes[prefix + "self_attn.q_norm.weight"] = (head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (head_dim,)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def _add_vocabulary(writer: gguf.GGUFWriter, vocabulary: Vocabulary) -> None:
    writer.add_tokenizer_model(vocabulary.model)
    if vocabulary.pre is not None:
        writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.types))
    if vocabulary.scores is not None:
        writer.add_token_scores(list(vocabulary.scores))
    if vocabulary.merges is not None:
        writer.add_token_merges(list(vocabulary.merges))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in vocabulary.extra.items():
        _add_value(writer, key, value)


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: np.ndarray, kind: gguf.GGMLQuantizationType | None) -> None:
    if kind is None or tensor.ndim == 1:
        writer.add_tensor(name, np.ascontiguousarray(tensor))
        return
    writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(tensor), kind), raw_dtype=kind)
