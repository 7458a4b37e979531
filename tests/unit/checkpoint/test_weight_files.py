import json
from pathlib import Path

import pytest

from pdserve.checkpoint import weight_files
from pdserve.errors import ConfigError


def touch(directory: Path, *names: str) -> list[Path]:
    paths = [directory / name for name in names]
    for path in paths:
        path.write_bytes(b"")
    return paths


def write_index(directory: Path, *names: str) -> None:
    content = {"metadata": {}, "weight_map": {f"w{i}": name for i, name in enumerate(names)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(content))


def test_single_file_wins_over_others_without_an_index(tmp_path: Path) -> None:
    single, _ = touch(tmp_path, "model.safetensors", "consolidated.safetensors")
    assert weight_files(tmp_path) == [single]


def test_shards_of_the_index_in_order(tmp_path: Path) -> None:
    first, second, _ = touch(tmp_path, "a.safetensors", "b.safetensors", "other.safetensors")
    write_index(tmp_path, "b.safetensors", "a.safetensors", "b.safetensors")
    assert weight_files(tmp_path) == [first, second]


def test_files_of_any_name(tmp_path: Path) -> None:
    paths = touch(tmp_path, "y.safetensors", "z.safetensors")
    assert weight_files(tmp_path) == paths


def test_missing_shard_is_named(tmp_path: Path) -> None:
    touch(tmp_path, "a.safetensors")
    write_index(tmp_path, "a.safetensors", "b.safetensors")
    with pytest.raises(ConfigError, match=r"b\.safetensors missing \(1 of 2 shards\)"):
        weight_files(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_damaged_index(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigError, match="is not a safetensors index"):
        weight_files(tmp_path)


def test_pytorch_weights_say_that_safetensors_are_needed(tmp_path: Path) -> None:
    touch(tmp_path, "pytorch_model.bin")
    with pytest.raises(ConfigError, match="PyTorch weights only, and safetensors are needed"):
        weight_files(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no \.safetensors file"):
        weight_files(tmp_path)
