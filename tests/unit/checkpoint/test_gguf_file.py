import random
from pathlib import Path

import gguf
import numpy as np
import pytest
from tiny_gguf import llama_config, plain_vocabulary, random_weights, write_gguf

from pdserve.checkpoint.gguf_file import open_gguf
from pdserve.errors import ConfigError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = llama_config(64, num_hidden_layers=1)
    return write_gguf(tmp_path / "model.gguf", config, random_weights(config), plain_vocabulary())


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_metadata_and_tensors_are_those_of_the_gguf_package(tmp_path: Path, kind: str) -> None:
    config = llama_config(64, num_hidden_layers=1)
    quantize = gguf.GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "a.gguf", config, random_weights(config), plain_vocabulary(), quantize=quantize)
    reader, ours = gguf.GGUFReader(path), open_gguf(path)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert list(ours.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        assert np.array_equal(ours.read(tensor.name), expected), tensor.name


def test_rows_come_in_the_order_asked_for(model: Path) -> None:
    file = open_gguf(model)
    tensor = file.tensors["blk.0.attn_v.weight"]
    order = np.arange(tensor.shape[0])[::-1].copy()
    rows = np.concatenate(list(file.read_rows(tensor, order)))
    assert np.array_equal(rows, file.read(tensor.name)[::-1])


def test_every_truncation_is_a_config_error_that_names_the_file(model: Path, tmp_path: Path) -> None:
    content = model.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(64), *range(64, len(content), 211), len(content) - 1]:
        cut.write_bytes(content[:length])
        with pytest.raises(ConfigError, match=r"cut\.gguf"):
            open_gguf(cut)


def test_damaged_headers_are_read_or_refused_and_never_hang(model: Path, tmp_path: Path) -> None:
    content = model.read_bytes()
    source = random.Random(5)
    damaged = tmp_path / "damaged.gguf"
    messages = []
    for _ in range(400):
        changed = bytearray(content)
        for _ in range(source.randint(1, 4)):
            changed[source.randrange(3000)] = source.randrange(256)
        damaged.write_bytes(changed)
        try:
            open_gguf(damaged)
        except ConfigError as error:
            messages.append(error.message)
    assert len(messages) > 50
    assert all(str(damaged) in message for message in messages)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "too short"),
        (b"\x80\x02}q\x00(X" * 10, "does not begin with the GGUF magic"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(64), "big endian"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(64), "its version is 1"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        open_gguf(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.gguf does not exist"):
        open_gguf(tmp_path / "nothing.gguf")


def test_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    config = llama_config(64, num_hidden_layers=1)
    path = write_gguf(
        tmp_path / "a.gguf", config, random_weights(config), plain_vocabulary(), metadata={"split.count": 2}
    )
    with pytest.raises(ConfigError, match="merge the parts"):
        open_gguf(path)


def test_values_of_another_type_are_refused(model: Path) -> None:
    file = open_gguf(model)
    with pytest.raises(ConfigError, match=r"llama\.block_count is int, expected str"):
        file.get("llama.block_count", str)
    with pytest.raises(ConfigError, match=r"has no llama\.nothing"):
        file.require("llama.nothing", int)
    assert file.get("llama.block_count", float) == 1.0
