from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import Session, build_reference, save

from pdserve.engine.models import load_model
from pdserve.errors import ConfigError
from pdserve.kernels.registry import get_backend

TOKENS = torch.arange(40)
DTYPE = torch.float32


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save(build_reference("llama"), tmp_path)


def run(directory: Path) -> torch.Tensor:
    return Session(load_model(directory, DTYPE, get_backend("auto", DTYPE)), DTYPE).run_chunks(TOKENS, 40)


def change(directory: Path, add: dict[str, torch.Tensor], remove: tuple[str, ...] = ()) -> None:
    path = directory / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name not in remove}
    save_file({**tensors, **add}, path)


def refuse(directory: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        load_model(directory, DTYPE, get_backend("auto", DTYPE))
    return raised.value.message


def test_shards_give_the_same_model(directory: Path, tmp_path: Path) -> None:
    sharded = save(build_reference("llama"), tmp_path / "sharded", max_shard_size="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert torch.equal(run(sharded), run(directory))


def test_weights_are_converted_to_the_dtype(directory: Path) -> None:
    expected = run(directory)
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(directory / "model.safetensors").items()}
    change(directory, tensors)
    rounded = run(directory)
    change(directory, {name: tensor.float() for name, tensor in tensors.items()})
    assert torch.equal(run(directory), rounded)
    assert not torch.equal(rounded, expected)


def test_a_missing_tensor_is_named(directory: Path) -> None:
    change(directory, {}, remove=("model.layers.1.mlp.up_proj.weight",))
    assert "model.layers.1.mlp.up_proj.weight is missing" in refuse(directory)


def test_an_extra_tensor_is_named(directory: Path) -> None:
    change(directory, {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)})
    assert refuse(directory).endswith("does not use: model.layers.0.self_attn.q_proj.bias")


def test_a_wrong_shape_is_named_with_both_shapes(directory: Path) -> None:
    change(directory, {"model.layers.0.mlp.down_proj.weight": torch.zeros(64, 100)})
    assert "model.layers.0.mlp.down_proj.weight has shape (64, 100); config.json asks for (64, 112)" in refuse(
        directory
    )


def test_a_quantised_tensor_is_refused(directory: Path) -> None:
    change(directory, {"model.norm.weight": torch.zeros(64, dtype=torch.int8)})
    assert "model.norm.weight is of type torch.int8" in refuse(directory)


def test_a_damaged_file_is_named(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    assert f"model file {path} cannot be read" in refuse(directory)


def test_a_name_in_two_files_is_refused(directory: Path) -> None:
    save_file({"model.norm.weight": torch.ones(64)}, directory / "more.safetensors")
    names = ["model.safetensors", "more.safetensors"]
    index = {"weight_map": {f"tensor{i}": name for i, name in enumerate(names)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model.norm.weight stands in both" in refuse(directory)


def test_derived_tensors_and_a_tied_head_may_stand_in_the_files(tmp_path: Path) -> None:
    directory = save(build_reference("llama-tied"), tmp_path)
    expected = run(directory)
    change(
        directory,
        {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "lm_head.weight": torch.ones(131, 64)},
    )
    assert torch.equal(run(directory), expected)
