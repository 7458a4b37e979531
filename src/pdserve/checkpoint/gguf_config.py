"""A GGUF file's metadata as a transformers configuration (``config.json`` and ``generation_config.json``)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pdserve.checkpoint.gguf_file import GGUFFile
from pdserve.checkpoint.rope_freqs import ROPE_FREQS_TENSOR, llama3_rope_scaling
from pdserve.errors import ConfigError

_ARCHITECTURES = {
    # GGUF's "llama" covers Llama, SmolLM2 and Mistral: the computation is Llama's.
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}
_DEFAULT_ROPE_THETA = 10000.0
_MAX_SIZE = 1 << 30


def build_config(gguf: GGUFFile, dtype: str) -> dict[str, Any]:
    """The content of ``config.json``.

    Args:
        gguf: the model.
        dtype: of the weights beside it, ``bfloat16`` or ``float32``.

    Raises:
        ConfigError: the architecture or one of its settings is not supported, or the metadata is incomplete.
    """
    arch = _architecture(gguf)
    model_type, model_class = _ARCHITECTURES[arch]
    num_heads = _size(gguf, f"{arch}.attention.head_count")
    hidden_size = _size(gguf, f"{arch}.embedding_length")
    head_dim = _size(gguf, f"{arch}.attention.key_length", hidden_size // num_heads)
    _check_supported(gguf, arch, head_dim)
    config: dict[str, Any] = {
        "architectures": [model_class],
        "model_type": model_type,
        "dtype": dtype,
        "vocab_size": _vocab_size(gguf),
        "hidden_size": hidden_size,
        "intermediate_size": _size(gguf, f"{arch}.feed_forward_length"),
        "num_hidden_layers": _size(gguf, f"{arch}.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _size(gguf, f"{arch}.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _size(gguf, f"{arch}.context_length"),
        "rms_norm_eps": _decimal(gguf.require(f"{arch}.attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _rope_theta(gguf, arch),
        "rope_scaling": _rope_scaling(gguf, arch, head_dim),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "use_cache": True,
        **token_ids(gguf),
    }
    if model_type == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in gguf.tensors
    elif model_type == "qwen3":
        config["attention_bias"] = "blk.0.attn_q.bias" in gguf.tensors
    return config


def build_generation_config(gguf: GGUFFile) -> dict[str, Any]:
    """The content of ``generation_config.json``: the token ids that begin, end and pad a text."""
    return token_ids(gguf)


def token_ids(gguf: GGUFFile) -> dict[str, Any]:
    """``bos_token_id``, ``eos_token_id`` and ``pad_token_id``; several EOS ids are a list."""
    num_tokens = len(gguf.get("tokenizer.ggml.tokens", list, []))

    def get(name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        token_id = gguf.get(key, int)
        if token_id is not None and not 0 <= token_id < num_tokens:
            raise ConfigError(f"{gguf.path}: {key} is {token_id}, and the vocabulary has {num_tokens} tokens")
        return token_id

    # End of turn and end of message end an answer as much as end of text does.
    ends = [token_id for name in ("eos", "eot", "eom") if (token_id := get(name)) is not None]
    ends = list(dict.fromkeys(ends))
    return {
        "bos_token_id": get("bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": get("padding"),
    }


def permutes_rotary_rows(gguf: GGUFFile) -> bool:
    """Whether q and k rows lie in GGML's interleaved rotary order (Llama's do, Qwen's do not)."""
    return _architecture(gguf) in ("llama", "mistral")


def _architecture(gguf: GGUFFile) -> str:
    arch = gguf.require("general.architecture", str)
    if arch not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ConfigError(f"{gguf.path}: architecture {arch!r} is not supported; supported are {known}")
    return arch


def _check_supported(gguf: GGUFFile, arch: str, head_dim: int) -> None:
    """Refuse what the configuration cannot express rather than compute something else."""
    if gguf.get(f"{arch}.expert_count", int, 0):
        raise ConfigError(f"{gguf.path}: mixtures of experts are not supported; use a dense model")
    rotary = gguf.get(f"{arch}.rope.dimension_count", int, head_dim)
    if rotary != head_dim:
        raise ConfigError(f"{gguf.path}: rope over {rotary} of {head_dim} head dimensions is not supported")
    value_dim = gguf.get(f"{arch}.attention.value_length", int, head_dim)
    if value_dim != head_dim:
        raise ConfigError(f"{gguf.path}: key heads of {head_dim} and value heads of {value_dim} are not supported")
    window = gguf.get(f"{arch}.attention.sliding_window", int, 0)
    if 0 < window < _size(gguf, f"{arch}.context_length"):
        raise ConfigError(f"{gguf.path}: sliding-window attention ({window} tokens) is not supported in GGUF files")


def _size(gguf: GGUFFile, key: str, default: int | None = None) -> int:
    """A count or length of the metadata: a number above 0 that some file could have."""
    value = gguf.require(key, int) if default is None else gguf.get(key, int, default)
    if not 0 < value <= _MAX_SIZE:
        raise ConfigError(f"{gguf.path}: {key} is {value}; the file is damaged")
    return value


def _vocab_size(gguf: GGUFFile) -> int:
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None:
        raise ConfigError(f"{gguf.path}: tensor token_embd.weight is missing; the file is incomplete")
    return embedding.shape[0]


def _decimal(value: float) -> float:
    """The shortest decimal that gives the float32 in the file: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_theta(gguf: GGUFFile, arch: str) -> float:
    return _decimal(gguf.get(f"{arch}.rope.freq_base", float, _DEFAULT_ROPE_THETA))


def _rope_scaling(gguf: GGUFFile, arch: str, head_dim: int) -> dict[str, Any] | None:
    prefix = f"{arch}.rope.scaling"
    kind = gguf.get(f"{prefix}.type", str, "none")
    factor = gguf.get(f"{prefix}.factor", float) or gguf.get(f"{arch}.rope.scale_linear", float)
    if ROPE_FREQS_TENSOR in gguf.tensors:
        freqs: npt.NDArray[np.float32] = gguf.read(ROPE_FREQS_TENSOR)
        try:
            return llama3_rope_scaling(freqs, head_dim, _rope_theta(gguf, arch))
        except ValueError as error:
            raise ConfigError(f"{gguf.path}: {error}") from error
    if kind == "yarn" and factor:
        return _yarn_scaling(gguf, prefix, _decimal(factor))
    if kind in ("none", "linear"):
        scaled = factor is not None and factor not in (0.0, 1.0)
        return {"rope_type": "linear", "factor": _decimal(factor)} if scaled and factor else None
    raise ConfigError(f"{gguf.path}: rope scaling {kind!r} is not supported; supported are linear, yarn and llama3")


def _yarn_scaling(gguf: GGUFFile, prefix: str, factor: float) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    original = gguf.get(f"{prefix}.original_context_length", int)
    if original:
        scaling["original_max_position_embeddings"] = original
    for name in ("beta_fast", "beta_slow"):
        value = gguf.get(f"{prefix}.yarn_{name}", float)
        if value is not None:
            scaling[name] = _decimal(value)
    attention_factor = gguf.get(f"{prefix}.yarn_attn_factor", float) or gguf.get(f"{prefix}.attn_factor", float)
    if attention_factor is not None and attention_factor != 1.0:
        # GGML multiplies its own magnitude scale with this; transformers takes the product.
        scaling["attention_factor"] = _decimal(attention_factor) * (1.0 + 0.1 * float(np.log(factor)))
    return scaling
