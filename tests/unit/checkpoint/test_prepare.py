import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_gguf import llama_config, plain_vocabulary, random_weights, write_gguf
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from pdserve.checkpoint import ModelKind, ModelSource, cached_directory, prepare, prepare_tokenizer, prepare_weights
from pdserve.errors import ConfigError

FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}

CONVERT = """
import logging, sys
from pathlib import Path
from pdserve.checkpoint import ModelKind, ModelSource, gguf_weights, prepare, prepare_weights
from pdserve.errors import ConfigError
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
source = ModelSource(ModelKind.GGUF, Path(sys.argv[1]), "tiny")
{before}
try:
    print("directory", prepare_weights(source, "float32"))
except ConfigError as error:
    print("refused", error.message)
"""
DIE_HALF_WAY = """
import os
def die(gguf, plan, dtype, directory):
    (directory / "model.safetensors").write_bytes(b"half")
    os._exit(9)
prepare.write_weights = die
"""
SMALL_DISK = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
"""


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    config = llama_config(64)
    path = write_gguf(tmp_path / "tiny.gguf", config, random_weights(config), plain_vocabulary())
    return ModelSource(ModelKind.GGUF, path, "tiny")


def start(source: ModelSource, before: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CONVERT.format(before=before), str(source.path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if not path.name.endswith(".lock")}


def test_directory_is_complete_and_built_once(source: ModelSource, cache_dir: Path) -> None:
    directory = prepare_weights(source, "float32")
    assert directory.parent == cache_dir / "models"
    assert names(directory) == FILES | {"model.safetensors"}
    before = {path: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert prepare_weights(source, "float32") == directory
    assert {path: path.stat().st_mtime_ns for path in directory.iterdir()} == before


def test_dtypes_content_and_tokenizer_have_directories_of_their_own(source: ModelSource) -> None:
    directories = {prepare_weights(source, "float32"), prepare_weights(source, "bfloat16"), prepare_tokenizer(source)}
    config = llama_config(64)
    write_gguf(source.path, config, random_weights(config, seed=1), plain_vocabulary())
    assert len(directories | {prepare_weights(source, "float32")}) == 4


def test_tokenizer_needs_no_weights(source: ModelSource) -> None:
    directory = prepare_tokenizer(source)
    assert names(directory) == FILES
    ours = Tokenizer.from_file(str(directory / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(directory)
    assert theirs.encode("</s>") == ours.encode("</s>").ids == [2]


def test_hugging_face_directory_is_its_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    source = ModelSource(ModelKind.HF_DIRECTORY, tmp_path, "m")
    assert prepare_tokenizer(source) == tmp_path
    with pytest.raises(ConfigError, match=r"no \.safetensors"):
        prepare_weights(source, "float32")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert prepare_weights(source, "float32") == tmp_path


def test_unknown_dtype(source: ModelSource) -> None:
    with pytest.raises(ConfigError, match="'float8' is not supported; use one of bfloat16, float32"):
        prepare_weights(source, "float8")


def test_a_crash_half_way_leaves_nothing_that_counts(source: ModelSource, cache_dir: Path) -> None:
    crashed = start(source, DIE_HALF_WAY)
    crashed.communicate(timeout=60)
    assert crashed.returncode == 9
    (left,) = names(cache_dir / "models")
    assert left.endswith(".tmp")
    directory = prepare_weights(source, "float32")
    assert names(cache_dir / "models") == {directory.name}
    assert (directory / "model.safetensors").stat().st_size > 4


def test_processes_that_start_at_once_convert_once(source: ModelSource) -> None:
    processes = [start(source) for _ in range(3)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert sum("this happens once" in output for output in outputs) == 1, outputs
    directories = {output.strip().splitlines()[-1] for output in outputs}
    assert directories == {f"directory {prepare_weights(source, 'float32')}"}


def test_a_full_disk_is_an_error_that_leaves_nothing(source: ModelSource, cache_dir: Path) -> None:
    output = start(source, SMALL_DISK).communicate(timeout=60)[0]
    assert "refused" in output
    assert "cannot be written" in output
    assert "PDSERVE_CACHE_DIR" in output
    assert names(cache_dir / "models") == set()


def test_too_little_space_is_told_before_anything_is_written(
    source: ModelSource, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "converted_bytes", lambda tensor, dtype: 10**18)
    with pytest.raises(ConfigError, match=r"is full \(\d+ MB are needed, \d+ MB are free\)"):
        prepare_weights(source, "float32")
    assert names(cache_dir / "models") == set()


def test_quota_counts_as_a_full_disk(cache_dir: Path) -> None:
    def build(directory: Path) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with pytest.raises(ConfigError, match="is full"):
        cached_directory.build_once("m", build)


def test_cache_that_cannot_be_made(source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("PDSERVE_CACHE_DIR", str(blocked))
    with pytest.raises(ConfigError, match="set PDSERVE_CACHE_DIR"):
        prepare_weights(source, "float32")


@pytest.mark.parametrize("call", [prepare_tokenizer, lambda source: prepare_weights(source, "bfloat16")])
def test_damaged_and_missing_files_name_the_file(source: ModelSource, cache_dir: Path, call: object) -> None:
    assert callable(call)
    content = source.path.read_bytes()
    source.path.write_bytes(content[:-1000])
    with pytest.raises(ConfigError, match=r"tiny\.gguf is not a usable GGUF file: it is truncated"):
        call(source)
    assert names(cache_dir / "models") == set()
    source.path.unlink()
    with pytest.raises(ConfigError, match=r"tiny\.gguf cannot be read: No such file"):
        call(source)
