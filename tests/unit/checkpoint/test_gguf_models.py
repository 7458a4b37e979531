"""Converted GGUF files against the weights that went in and against transformers' own reading."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tiny_gguf import llama_config, plain_vocabulary, random_weights, write_gguf
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pdserve.checkpoint import ModelKind, ModelSource, gguf_weights, prepare_weights, resolve_model, weight_files
from pdserve.errors import ConfigError

VOCAB = 64
QWEN3 = {"model_type": "qwen3", "head_dim": 16}


def source_of(path: Path) -> ModelSource:
    return ModelSource(ModelKind.GGUF, path, path.stem)


def load(directory: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"} | (
        {} if model.config.tie_word_embeddings else {"lm_head.weight": model.state_dict()["lm_head.weight"]}
    )


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], torch.as_tensor(tensor)), name


def test_smollm2_weights_are_those_that_transformers_reads() -> None:
    source = resolve_model("smollm2-135m-instruct")
    expected = AutoModelForCausalLM.from_pretrained(
        source.path.parent, gguf_file=source.path.name, dtype=torch.float32
    ).state_dict()
    for dtype in (torch.float32, torch.bfloat16):
        directory = prepare_weights(source, str(dtype).removeprefix("torch."))
        actual = AutoModelForCausalLM.from_pretrained(directory).state_dict()
        assert actual["model.norm.weight"].dtype == dtype
        assert_same(actual, {name: tensor.to(dtype) for name, tensor in expected.items()})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"attention_bias": True},
        {"head_dim": 16},
        {"model_type": "qwen2"},
        {"model_type": "qwen2", "tie_word_embeddings": False},
        QWEN3,
    ],
    ids=["llama", "untied", "bias", "wide-heads", "qwen2", "qwen2-untied", "qwen3"],
)
def test_converted_weights_equal_the_originals(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = llama_config(VOCAB, **changes)
    weights = random_weights(config)
    path = write_gguf(tmp_path / "tiny.gguf", config, weights, plain_vocabulary())
    directory = prepare_weights(source_of(path), "float32")
    assert_same(load(directory), weights)
    written = AutoConfig.from_pretrained(directory)
    for name in ("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings", "hidden_size", "vocab_size"):
        assert getattr(written, name) == config[name], name
    assert written.rope_parameters["rope_theta"] == config["rope_theta"]
    assert getattr(written, "head_dim", config["head_dim"]) == config["head_dim"]


# transformers takes Qwen3's heads to be 128 wide, whatever the file says.
@pytest.mark.parametrize(
    "changes",
    [{}, {"model_type": "qwen2"}, {"model_type": "qwen3", "head_dim": 128}],
    ids=["llama", "qwen2", "qwen3"],
)
def test_logits_equal_those_of_transformers_own_reading(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = llama_config(VOCAB, **changes)
    path = write_gguf(tmp_path / "tiny.gguf", config, random_weights(config), plain_vocabulary())
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(prepare_weights(source_of(path), "float32"))
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_quantised_rows_are_reordered_before_they_are_dequantised(tmp_path: Path) -> None:
    config = llama_config(VOCAB)
    weights = random_weights(config)
    kind = gguf.GGMLQuantizationType.Q8_0
    path = write_gguf(tmp_path / "tiny.gguf", config, weights, plain_vocabulary(), quantize=kind)

    def rounded(tensor: np.ndarray) -> np.ndarray:
        return tensor if tensor.ndim == 1 else gguf.dequantize(gguf.quantize(tensor, kind), kind)

    actual = load(prepare_weights(source_of(path), "float32"))
    assert_same(actual, {name: rounded(tensor) for name, tensor in weights.items()})


def test_large_models_are_cut_into_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_weights, "MAX_SHARD_BYTES", 20_000)
    config = llama_config(VOCAB)
    weights = random_weights(config)
    path = write_gguf(tmp_path / "tiny.gguf", config, weights, plain_vocabulary())
    directory = prepare_weights(source_of(path), "float32")
    files = weight_files(directory)
    assert len(files) > 2
    assert all(file.stat().st_size < 25_000 for file in files)
    assert_same(load(directory), weights)


def rope_config(**scaling: Any) -> dict[str, Any]:
    return llama_config(VOCAB, head_dim=64, rope_theta=500000.0, rope_scaling=scaling)


def inverse_frequencies(config: AutoConfig) -> torch.Tensor:
    kind = config.rope_parameters["rope_type"]
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))[0]


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (4.0, 4096)])
def test_llama3_rope_is_recovered_from_its_divisors(tmp_path: Path, factor: float, original: int) -> None:
    config = rope_config(
        rope_type="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=original,
    )
    scaled = inverse_frequencies(AutoConfig.for_model(**copy.deepcopy(config)))
    plain = 1.0 / 500000.0 ** (torch.arange(0, 64, 2).float() / 64)
    path = write_gguf(
        tmp_path / "tiny.gguf",
        config,
        random_weights(config),
        plain_vocabulary(),
        extra_tensors={"rope_freqs.weight": (plain / scaled).numpy()},
    )
    directory = prepare_weights(source_of(path), "float32")
    written = json.loads((directory / "config.json").read_text())
    assert written["rope_scaling"] == config["rope_scaling"]
    assert torch.allclose(inverse_frequencies(AutoConfig.from_pretrained(directory)), scaled, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"llama.rope.scaling.type": "none"}, None),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
            {"rope_type": "linear", "factor": 4.0},
        ),
        ({"llama.rope.scale_linear": 2.5}, {"rope_type": "linear", "factor": 2.5}),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
                "llama.rope.scaling.yarn_beta_fast": 16.0,
            },
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
        ),
    ],
)
def test_rope_scaling_of_the_metadata(
    tmp_path: Path, metadata: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    config = llama_config(VOCAB)
    path = write_gguf(tmp_path / "tiny.gguf", config, random_weights(config), plain_vocabulary(), metadata=metadata)
    directory = prepare_weights(source_of(path), "float32")
    assert json.loads((directory / "config.json").read_text())["rope_scaling"] == expected
    if expected is not None:
        assert torch.isfinite(inverse_frequencies(AutoConfig.from_pretrained(directory))).all()


def test_end_tokens_of_the_metadata(tmp_path: Path) -> None:
    config = llama_config(VOCAB)
    vocabulary = plain_vocabulary()
    vocabulary.extra = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.padding_token_id": 9}
    path = write_gguf(tmp_path / "tiny.gguf", config, random_weights(config), vocabulary)
    directory = prepare_weights(source_of(path), "bfloat16")
    for name in ("config.json", "generation_config.json"):
        written = json.loads((directory / name).read_text())
        ids = [written[f"{kind}_token_id"] for kind in ("bos", "eos", "pad")]
        assert ids == [1, [2, 7], 9], name


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.rope.dimension_count": 4}, "rope over 4 of 8"),
        ({"llama.attention.value_length": 4}, "key heads of 8 and value heads of 4"),
        ({"llama.attention.sliding_window": 16}, "sliding-window"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not supported"),
    ],
)
def test_variants_that_would_compute_something_else_are_refused(
    tmp_path: Path, metadata: dict[str, Any], message: str
) -> None:
    config = llama_config(VOCAB)
    path = write_gguf(tmp_path / "tiny.gguf", config, random_weights(config), plain_vocabulary(), metadata=metadata)
    with pytest.raises(ConfigError, match=message):
        prepare_weights(source_of(path), "float32")


def test_mistral_spelling_of_the_architecture_is_llamas(tmp_path: Path) -> None:
    config = llama_config(VOCAB)
    weights = random_weights(config)
    path = write_gguf(tmp_path / "tiny.gguf", config, weights, plain_vocabulary(), arch="mistral")
    assert_same(load(prepare_weights(source_of(path), "float32")), weights)


def test_damaged_metadata_is_converted_or_refused_and_never_hangs(tmp_path: Path) -> None:
    config = llama_config(VOCAB, num_hidden_layers=1)
    metadata = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}
    path = write_gguf(tmp_path / "tiny.gguf", config, random_weights(config), plain_vocabulary(), metadata=metadata)
    content = path.read_bytes()
    source = random.Random(1)
    num_refused = 0
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(source.randint(1, 3)):
            damaged[source.randrange(2700)] = source.choice((0, 1, 255, source.randrange(256)))
        path.write_bytes(damaged)
        try:
            prepare_weights(source_of(path), "float32")
        except ConfigError:
            num_refused += 1
    assert 50 < num_refused < 150


@pytest.mark.parametrize(
    ("key", "value"), [("llama.block_count", 1 << 20), ("llama.attention.head_count", 0), ("llama.context_length", 0)]
)
def test_sizes_that_no_model_has(tmp_path: Path, key: str, value: int) -> None:
    config = llama_config(VOCAB)
    names = {"llama.block_count": "num_hidden_layers", "llama.attention.head_count": "num_attention_heads"}
    weights = random_weights(config)
    changed = config | {names.get(key, "max_position_embeddings"): value}
    if key == "llama.attention.head_count":
        weights = {name: tensor for name, tensor in weights.items() if "q_proj" not in name}
    path = write_gguf(tmp_path / "tiny.gguf", changed | {"head_dim": 8}, weights, plain_vocabulary())
    with pytest.raises(ConfigError, match="the file is damaged"):
        prepare_weights(source_of(path), "float32")


def test_unknown_architecture_names_the_supported_ones(tmp_path: Path) -> None:
    config = llama_config(VOCAB)
    path = write_gguf(tmp_path / "tiny.gguf", config, random_weights(config), plain_vocabulary(), arch="gemma3")
    with pytest.raises(ConfigError, match="'gemma3' is not supported; supported are llama, mistral, qwen2, qwen3"):
        prepare_weights(source_of(path), "float32")


def test_missing_unknown_and_misshapen_tensors_are_refused(tmp_path: Path) -> None:
    config = llama_config(VOCAB)
    weights = random_weights(config)
    lacking = {name: tensor for name, tensor in weights.items() if not name.endswith("1.mlp.up_proj.weight")}
    misshapen = weights | {"model.norm.weight": np.ones(31, np.float32)}
    cases: list[tuple[dict[str, np.ndarray], dict[str, np.ndarray], str]] = [
        (lacking, {}, r"lacks tensors blk\.1\.ffn_up\.weight"),
        (weights, {"blk.0.mystery.weight": np.ones(4, np.float32)}, r"does not use: blk\.0\.mystery\.weight"),
        (misshapen, {}, r"output_norm\.weight has shape \[31\], its metadata says \[32\]"),
        (weights, {"rope_freqs.weight": np.full(4, 3.0, np.float32)}, "does not follow Llama 3's rule"),
    ]
    for index, (tensors, extra, message) in enumerate(cases):
        path = write_gguf(tmp_path / f"{index}.gguf", config, tensors, plain_vocabulary(), extra_tensors=extra)
        with pytest.raises(ConfigError, match=message):
            prepare_weights(source_of(path), "float32")


def test_bfloat16_rounds_to_the_nearest_even() -> None:
    source = np.random.default_rng(1)
    bits = source.integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = (source.integers(0, 2**16, 1000, dtype=np.uint32) << 16) | 0x8000
    values = np.concatenate([bits, ties, np.array([0x7F800000, 0xFF800000, 0x7F7FFFFF], np.uint32)]).view(np.float32)
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    actual = gguf_weights.to_bfloat16(values)
    number = ~np.isnan(values)
    assert np.array_equal(actual[number], expected[number])
    assert np.isnan(torch.from_numpy(actual.copy()).view(torch.bfloat16).float().numpy()[~number]).all()
