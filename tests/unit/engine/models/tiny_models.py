"""Tiny random models of every supported family, written by transformers, and steps run on ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from pdserve.engine.models import CausalLM
from pdserve.kernels.base import AttentionMetadata

BLOCK_SIZE = 16
_SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "attn_implementation": "eager",
}


def _llama(**changes: Any) -> Any:
    return transformers.LlamaConfig(**{**_SIZES, **changes})


def _rope(**parameters: Any) -> Any:
    return _llama(rope_parameters={"rope_theta": 10000.0, **parameters})


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "llama-mha": lambda: _llama(num_key_value_heads=4),
    "llama-gqa3": lambda: _llama(hidden_size=96, num_attention_heads=6),
    "llama-gqa4": lambda: _llama(num_key_value_heads=1),
    "llama-tied": lambda: _llama(tie_word_embeddings=True),
    "llama-biased": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama-head-dim": lambda: _llama(head_dim=32),
    "llama-llama3": lambda: _rope(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    "llama-linear": lambda: _rope(rope_type="linear", factor=4.0),
    "llama-yarn": lambda: _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=256),
    "mistral": lambda: transformers.MistralConfig(**_SIZES, sliding_window=None),
    "qwen2": lambda: transformers.Qwen2Config(**_SIZES),
    "qwen2-tied": lambda: transformers.Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**_SIZES, head_dim=32),
}


def build_reference(name: str, **changes: Any) -> Any:
    """A random float32 model; every vector and bias is random too, so that leaving one out shows."""
    config = CONFIGS[name]()
    config.update(changes)
    torch.manual_seed(len(name))
    build: Any = transformers.AutoModelForCausalLM.from_config
    model = build(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn(parameter.shape) * 0.3 + (0.0 if key.endswith("bias") else 1.0))
            else:
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[1] ** -0.5 * 2)
    return model


def save(model: Any, directory: Path, **options: Any) -> Path:
    """Write ``model`` as a Hugging Face directory."""
    model.save_pretrained(directory, **options)
    return directory


class Session:
    """One request on a model, with KV memory of its own that starts out as NaN."""

    def __init__(self, model: CausalLM, kv_dtype: torch.dtype, num_blocks: int = 24, seed: int = 0) -> None:
        config = model.config
        shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, BLOCK_SIZE, config.head_dim)
        self.model = model
        self.kv_cache = torch.full(shape, float("nan"), dtype=kv_dtype, device=model.backend.device)
        self.block_ids = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()

    def run(self, token_ids: Tensor, start: int, stop: int) -> Tensor:
        """Logits of tokens ``[start, stop)``, the ones before having run."""
        metadata = AttentionMetadata.build([stop - start], [stop], [self.block_ids], BLOCK_SIZE)
        hidden = self.model.forward(token_ids[start:stop], metadata, self.kv_cache)
        return self.model.compute_logits(hidden)

    def run_chunks(self, token_ids: Tensor, chunk: int) -> Tensor:
        """Logits of all tokens, ``chunk`` of them a step."""
        length = len(token_ids)
        return torch.cat([self.run(token_ids, p, min(p + chunk, length)) for p in range(0, length, chunk)])
