"""A Llama model of a few thousand random weights, written as a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB_SIZE = 199
_HIDDEN, _FEED_FORWARD, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM = 64, 96, 3, 4, 2, 16
_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": _HIDDEN,
    "intermediate_size": _FEED_FORWARD,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_DIM,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}


def write_tiny_model(directory: Path, *, seed: int = 0) -> Path:
    """Write config and weights; equal seeds give equal models.

    Weights are large enough that answers depend on every token of the prompt.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        values: torch.Tensor = torch.randn(*shape, generator=generator) * (1.5 / shape[-1] ** 0.5)
        return values.to(torch.bfloat16)

    tensors = {
        "model.embed_tokens.weight": draw(VOCAB_SIZE, _HIDDEN) * 8,
        "model.norm.weight": torch.ones(_HIDDEN, dtype=torch.bfloat16),
        "lm_head.weight": draw(VOCAB_SIZE, _HIDDEN),
    }
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": torch.ones(_HIDDEN, dtype=torch.bfloat16),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(_HIDDEN, dtype=torch.bfloat16),
            f"{prefix}.self_attn.q_proj.weight": draw(_HEADS * _HEAD_DIM, _HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": draw(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": draw(_KV_HEADS * _HEAD_DIM, _HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": draw(_HIDDEN, _HEADS * _HEAD_DIM),
            f"{prefix}.mlp.gate_proj.weight": draw(_FEED_FORWARD, _HIDDEN),
            f"{prefix}.mlp.up_proj.weight": draw(_FEED_FORWARD, _HIDDEN),
            f"{prefix}.mlp.down_proj.weight": draw(_HIDDEN, _FEED_FORWARD),
        }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(_CONFIG, indent=1))
    return directory
