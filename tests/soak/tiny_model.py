"""A tiny Llama with random weights and SmolLM2's tokenizer: real code paths at thousands of requests a minute."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from pdserve.checkpoint import prepare_tokenizer, resolve_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build_tiny_model(directory: Path, seed: int = 0) -> Path:
    """Write the model; the same seed gives the same weights."""
    directory.mkdir(parents=True, exist_ok=True)
    source = prepare_tokenizer(resolve_model("smollm2-135m-instruct"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, directory / name)
    vocab_size = json.loads((source / "config.json").read_text())["vocab_size"]
    (directory / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": vocab_size}))
    save_file(_build_weights(vocab_size, seed), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _build_weights(vocab_size: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).mul(shape[-1] ** -0.5).to(torch.bfloat16)

    weights = {"model.embed_tokens.weight": random(vocab_size, 64) * 8, "model.norm.weight": torch.ones(64).bfloat16()}
    shapes = {
        "self_attn.q_proj": (64, 64),
        "self_attn.k_proj": (32, 64),
        "self_attn.v_proj": (32, 64),
        "self_attn.o_proj": (64, 64),
        "mlp.gate_proj": (128, 64),
        "mlp.up_proj": (128, 64),
        "mlp.down_proj": (64, 128),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for name, shape in shapes.items():
            weights[f"{prefix}.{name}.weight"] = random(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{name}.weight"] = torch.ones(64).bfloat16()
    return weights
