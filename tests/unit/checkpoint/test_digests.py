import os
from pathlib import Path
from typing import Any

import pytest

from pdserve.checkpoint import architecture_digest, weights_digest
from pdserve.errors import ConfigError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def write(directory: Path, **files: bytes) -> Path:
    directory.mkdir()
    for name, content in files.items():
        (directory / f"{name}.safetensors").write_bytes(content)
    return directory


def test_digest_is_of_the_content_and_not_of_names(tmp_path: Path) -> None:
    one = weights_digest(write(tmp_path / "1", a=b"abc", b=b"def"))
    assert len(one) == 32
    assert weights_digest(write(tmp_path / "2", x=b"abc", y=b"def")) == one
    assert weights_digest(write(tmp_path / "3", a=b"def", b=b"abc")) != one
    assert weights_digest(write(tmp_path / "4", a=b"abc", b=b"deF")) != one


def test_digest_is_remembered_until_the_file_changes(tmp_path: Path, cache_dir: Path) -> None:
    directory = write(tmp_path / "m", a=b"abc")
    first = weights_digest(directory)
    (remembered,) = (cache_dir / "digests").iterdir()
    remembered.write_text("from the cache")
    assert weights_digest(directory) == "from the cache"
    os.utime(directory / "a.safetensors", ns=(1, 1))
    assert weights_digest(directory) == first
    (directory / "a.safetensors").write_bytes(b"abcd")
    assert weights_digest(directory) not in (first, "from the cache")


def test_digest_without_a_writable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    directory = write(tmp_path / "m", a=b"abc")
    expected = weights_digest(directory)
    monkeypatch.setenv("PDSERVE_CACHE_DIR", str(blocked))
    assert weights_digest(directory) == expected
    assert "cannot be cached" in caplog.text


def test_digest_needs_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no \.safetensors"):
        weights_digest(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "qwen2"},
        {"num_hidden_layers": 3},
        {"num_key_value_heads": 4},
        {"head_dim": 16},
        {"rms_norm_eps": 1e-6},
        {"rope_theta": 500000.0},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
        {"attention_bias": True},
        {"tie_word_embeddings": False},
        {"sliding_window": 4096},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_decides_the_computation_changes_the_digest(change: dict[str, Any]) -> None:
    assert architecture_digest(CONFIG | change) != architecture_digest(CONFIG)


@pytest.mark.parametrize(
    "change",
    [
        {"architectures": ["Other"], "transformers_version": "9", "_name_or_path": "x", "dtype": "float32"},
        {"bos_token_id": 7, "eos_token_id": [1, 2], "max_position_embeddings": 99, "use_cache": False},
        {"head_dim": 8, "attention_bias": False, "mlp_bias": None, "rope_scaling": None},
        {"rope_theta": 10000},
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ],
    ids=["names", "token ids", "defaults", "number", "rope_parameters"],
)
def test_what_says_the_same_gives_the_same_digest(change: dict[str, Any]) -> None:
    assert architecture_digest(dict(reversed((CONFIG | change).items()))) == architecture_digest(CONFIG)


def test_both_spellings_of_rope_scaling_are_one() -> None:
    old = CONFIG | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    new = CONFIG | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
    assert architecture_digest(old) == architecture_digest(new)
