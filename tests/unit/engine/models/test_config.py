from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from pdserve.engine.models import ModelConfig, load_config_file
from pdserve.engine.models.rope_config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling
from pdserve.errors import ConfigError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
    "eos_token_id": 2,
}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({**LLAMA, **changes})


def test_a_plain_llama() -> None:
    config = read()
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert config.rope == RopeConfig(theta=1e5, scaling=None, max_context_len=512)
    assert config.max_position_embeddings == 512
    assert config.eos_token_ids == (2,)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm) == (False,) * 4
    assert not config.tie_word_embeddings


def test_what_each_family_adds() -> None:
    assert read(head_dim=48).head_dim == 48
    assert read(num_key_value_heads=None).num_kv_heads == 4
    biased = read(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    assert (biased.qkv_bias, biased.output_bias, biased.mlp_bias, biased.tie_word_embeddings) == (True,) * 4
    qwen2 = read(architectures=["Qwen2ForCausalLM"])
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    qwen3 = read(architectures=["Qwen3ForCausalLM"], attention_bias=True)
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm) == (True, True, True)
    mistral = read(architectures=["MistralForCausalLM"], attention_bias=True)
    assert (mistral.qkv_bias, mistral.output_bias) == (False, False)


def test_rope_in_the_new_spelling_wins() -> None:
    config = read(rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 2})
    assert config.rope == RopeConfig(5000.0, LinearScaling(2.0), 512)


def test_rope_scaling_kinds_in_the_old_spelling() -> None:
    llama3 = {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    scaled = read(rope_scaling={**llama3, "original_max_position_embeddings": 128}).rope
    assert scaled.scaling == Llama3Scaling(8.0, 1.0, 4.0, 128)
    assert scaled.max_context_len == 512
    yarn = read(rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert yarn.rope.scaling == YarnScaling(4.0, 512, pytest.approx(1.13862943611), 32.0, 1.0, True)
    assert yarn.max_position_embeddings == 2048


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported"),
        ({"architectures": None}, "architecture none is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size is 'many'; it must be a positive whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0"),
        ({"attention_bias": "no"}, "attention_bias is 'no'; it must be true or false"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value_heads 3"),
        ({"hidden_size": 66}, "head_dim is missing and hidden_size 66 is no multiple"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported; use default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; it must be an object"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor 4.0 must be above low_freq_factor 4.0",
        ),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"eos_token_id": [2, 100]}, "vocab_size 100 has no token 100"),
        ({"sliding_window": -1, "architectures": ["MistralForCausalLM"]}, "sliding_window is -1"),
    ],
)
def test_what_is_unsupported_or_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(**changes)
    assert message in raised.value.message


def test_a_sliding_window_limits_the_context_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert read(architectures=["MistralForCausalLM"], sliding_window=100).max_position_embeddings == 100
    assert "limited to 100 tokens instead of 512" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["MistralForCausalLM"], "sliding_window": None},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 512},
        {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100, "use_sliding_window": False},
        {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 100},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 100, "layer_types": ["full_attention"] * 2},
    ],
)
def test_a_window_that_changes_nothing_limits_nothing(
    changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert read(**changes).max_position_embeddings == 512
    assert caplog.text == ""


def test_end_tokens_come_from_the_generation_config_where_it_names_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == (7, 9)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: No such file"):
        load_config_file(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        load_config_file(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="holds no JSON object"):
        load_config_file(tmp_path)
