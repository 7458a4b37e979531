"""What a Hugging Face ``config.json`` says about a model of the Llama family, checked and with its defaults filled in.

Everything that would change the computation and is not implemented is refused by name. No torch here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdserve.engine.models.rope_config import RopeConfig
from pdserve.engine.models.typed_fields import TypedFields
from pdserve.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Family:
    """What an architecture adds to plain Llama.

    Attributes:
        qkv_bias: whether q, k and v have biases; None = as ``attention_bias`` says.
        output_bias: the same for the attention's output projection.
        qk_norm: whether each head of q and k is normed before the rotation.
        window_switch: whether ``use_sliding_window`` must be true for ``sliding_window`` to count.
    """

    qkv_bias: bool | None = None
    output_bias: bool | None = None
    qk_norm: bool = False
    window_switch: bool = False


_FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family(),
    "MistralForCausalLM": _Family(qkv_bias=False, output_bias=False),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, output_bias=False, window_switch=True),
    "Qwen3ForCausalLM": _Family(qk_norm=True, window_switch=True),
}


@dataclass(frozen=True)
class ModelConfig:
    """A model of the Llama family.

    Attributes:
        architecture: the class's name in transformers.
        vocab_size: V.
        hidden_size: D.
        intermediate_size: I.
        num_layers: L.
        num_heads: N.
        num_kv_heads: K.
        head_dim: H.
        rms_norm_eps: epsilon of all norms.
        max_position_embeddings: the longest context that is computed exactly, in tokens.
        tie_word_embeddings: whether the output head is the embedding.
        qkv_bias: whether q, k and v projections have a bias.
        output_bias: whether the attention's output projection has one.
        mlp_bias: whether the feed-forward projections have one.
        qk_norm: whether heads of q and k are normed before the rotation.
        rope: the rotary embedding.
        eos_token_ids: tokens that end an answer.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read the content of a ``config.json``.

        Raises:
            ConfigError: a field is missing, wrong or asks for something that is not supported; it is named.
        """
        fields = TypedFields(config, "config.json")
        architecture = _read_architecture(fields)
        family = _FAMILIES[architecture]
        _refuse_unsupported(fields)
        num_heads = fields.positive_int("num_attention_heads")
        num_kv_heads = fields.positive_int("num_key_value_heads", default=num_heads)
        hidden_size = fields.positive_int("hidden_size")
        if num_heads % num_kv_heads:
            raise ConfigError(
                f"config.json: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
            )
        if config.get("head_dim") is None and hidden_size % num_heads:
            raise ConfigError(
                f"config.json: head_dim is missing and hidden_size {hidden_size} is no multiple of"
                f" num_attention_heads {num_heads}"
            )
        head_dim = fields.positive_int("head_dim", default=hidden_size // num_heads)
        if head_dim % 2:
            raise ConfigError(f"config.json: head_dim is {head_dim}; rotary embeddings need an even one")
        rope = RopeConfig.from_hf(config)
        attention_bias = fields.boolean("attention_bias", default=False)
        return cls(
            architecture=architecture,
            vocab_size=fields.positive_int("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=fields.positive_int("intermediate_size"),
            num_layers=fields.positive_int("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.positive_float("rms_norm_eps", default=1e-6),
            max_position_embeddings=_limit_to_window(rope.max_context_len, fields, family),
            tie_word_embeddings=fields.boolean("tie_word_embeddings", default=False),
            qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
            output_bias=attention_bias if family.output_bias is None else family.output_bias,
            mlp_bias=fields.boolean("mlp_bias", default=False) if architecture == "LlamaForCausalLM" else False,
            qk_norm=family.qk_norm,
            rope=rope,
            eos_token_ids=_read_token_ids(fields, "eos_token_id", fields.positive_int("vocab_size")),
        )

    @classmethod
    def from_directory(cls, directory: Path) -> ModelConfig:
        """Read ``config.json``, and the end tokens from ``generation_config.json`` where it names any.

        Raises:
            ConfigError: a file cannot be read, or as `from_hf`.
        """
        config = load_config_file(directory)
        generation = directory / "generation_config.json"
        if generation.is_file():
            eos = _load_json(generation).get("eos_token_id")
            if eos is not None:
                config["eos_token_id"] = eos
        return cls.from_hf(config)


def load_config_file(directory: Path) -> dict[str, Any]:
    """The content of ``config.json`` in ``directory``.

    Raises:
        ConfigError: it is missing, or not a JSON object.
    """
    return _load_json(directory / "config.json")


def _load_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"model file {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"model file {path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"model file {path} holds no JSON object")
    return content


def _read_architecture(fields: TypedFields) -> str:
    names = fields.content.get("architectures") or ["none"]
    name = str(names[0]) if isinstance(names, list) else str(names)
    if name not in _FAMILIES:
        raise ConfigError(f"architecture {name} is not supported; supported are {', '.join(_FAMILIES)}")
    return name


def _refuse_unsupported(fields: TypedFields) -> None:
    activation = fields.content.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(f"config.json: hidden_act {activation!r} is not supported; only silu is")
    if fields.content.get("quantization_config"):
        raise ConfigError(
            "config.json: quantization_config is not supported; use an unquantised checkpoint or a GGUF file"
        )


def _limit_to_window(context_len: int, fields: TypedFields, family: _Family) -> int:
    """The context within which sliding-window attention, if any, equals full attention."""
    window = fields.content.get("sliding_window")
    layer_types = fields.content.get("layer_types")
    if window is None or (family.window_switch and not fields.boolean("use_sliding_window", default=False)):
        return context_len
    if isinstance(layer_types, list) and "sliding_attention" not in layer_types:
        return context_len
    window = fields.positive_int("sliding_window")
    if window < context_len:
        logger.warning(
            "this model attends through a sliding window of %d tokens, which is not supported beyond the window:"
            " contexts are limited to %d tokens instead of %d",
            window,
            window,
            context_len,
        )
    return min(context_len, window)


def _read_token_ids(fields: TypedFields, name: str, vocab_size: int) -> tuple[int, ...]:
    value = fields.content.get(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise ConfigError(f"config.json: {name} is {value!r}; it must be a token id or a list of them")
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise ConfigError(f"config.json: {name} is {value!r}; vocab_size {vocab_size} has no token {token_id}")
    return tuple(ids)
